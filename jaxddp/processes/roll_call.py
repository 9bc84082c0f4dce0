"""All processes of a job say that they are there, before a framework connects them.

``jax.distributed.initialize`` aborts every process if one is missing, without its number, and a second process with a
rank that exists aborts a job that runs. Here each process sends process 0 JSON with the job's token. Strangers are sent
away. When all have come, process 0 compares what they bring, and answers with nothing, or the error that all raise.
"""

import contextlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from .job import Job, print_line

_RETRY_S = 0.1
_MESSAGE_S = 1.0  # for one that has called to say who it is
_LATE_S = 5.0  # after the timeout, in which process 0 names those that are missing
_MAX_BYTES = 2**20  # of a message


class ReplicaError(RuntimeError):
    """Ranks hold different values of what should be the same."""


def meet(job: Job, alike: Mapping[str, Any], timeout_s: float) -> dict[int, Connection]:
    """Waits for all processes of a job, and compares what they bring; every process calls it.

    ``alike`` are JSON values. Gives process 0 a connection to each other process, by its number, and the others that to
    process 0. Raises a ValueError if the port is taken, processes do not come in time, or they disagree.
    """
    alike = {"num_processes": job.num_processes, **alike}
    if job.process_id > 0:
        return {0: _report(job, alike, timeout_s)}
    deadline = time.monotonic() + timeout_s
    came, connections = {0: alike}, dict[int, Connection]()
    try:
        listener = job.listen()
    except (OSError, OverflowError) as error:
        why = f"cannot listen ({error}): set MASTER_ADDR and MASTER_PORT"
        raise ValueError(f"coordinator {job.address} {why}") from error
    with listener:
        listener.settimeout(_RETRY_S)
        while len(came) < job.num_processes and time.monotonic() < deadline:
            try:
                caller, (address, *_) = listener.accept()
            except OSError:  # nobody called, or has left already
                continue
            connection = Connection(caller.detach())
            number, its, refusal = _parse(job, connection)
            if number in came:
                refusal = f"process_id (={number}) must be one process's: two have joined under it"
            if not refusal:
                came[number], connections[number] = its, connection
                continue
            print_line(f"jaxddp: {address} is refused at {job.address}: {refusal}")
            with connection, contextlib.suppress(OSError):
                connection.send_bytes(refusal.encode())
    fault = disagreement([came[number] for number in sorted(came)])
    if missing := [str(number) for number in range(job.num_processes) if number not in came]:
        missed = f"process {', '.join(missing)} of {job.num_processes}"
        fault = f"{missed} must join at {job.address} within {timeout_s:g} s"
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.send_bytes(fault.encode())
    if fault:
        raise ValueError(fault)
    return connections


def address_here(job: Job, connections: Mapping[int, Connection]) -> str | None:
    """The address at which others reach this process, by their connections; None if only this host's may reach it."""
    addresses = []
    for connection in connections.values():
        with socket.socket(fileno=os.dup(connection.fileno())) as ours:
            addresses.append(ours.getsockname()[0])
    address = min(addresses, key=_is_loopback)
    return None if _is_loopback(address) and not _is_loopback(job.bind_host) else address


def disagreement(said: Sequence[Mapping[str, Any]], who: str = "process") -> str:
    """Gives one line about the first entry of JSON values that ``who``, by number, has unlike the first; else ""."""
    for name in dict.fromkeys(name for one in said for name in one):
        expected, *others = (one.get(name, "absent") for one in said)
        unlike: dict[str, list[str]] = {}
        for number, value in enumerate(others, 1):
            if value != expected:
                unlike.setdefault(repr(value), []).append(str(number))
        if unlike:
            found = "; ".join(f"{value} in {who} {', '.join(where)}" for value, where in unlike.items())
            return f"{name} (={found}) must be {expected!r}, as in {who} 0"
    return ""


def replicas_differ(name: str, ranks: Sequence[int], num_more: int, step: int) -> ReplicaError:
    """The error about a tensor, the ranks that do not hold what most do, and how many more tensors differ."""
    listed = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    more = f", as do {num_more} more" * (num_more > 0)
    return ReplicaError(
        f"{name} of rank{'s' * (len(ranks) > 1)} {listed} differs from what most ranks hold after step {step}{more}: "
        "a device or its memory may be faulty"
    )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _parse(job: Job, connection: Connection) -> tuple[int, dict[str, Any], str]:
    """A process's number, what it brings, and why it is refused, if it is."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError, OSError, EOFError):
        token, number, its = json.loads(_hear(connection, _MESSAGE_S))
        is_known = hmac.compare_digest(token.encode(), job.token.encode())
        if is_known and number in range(1, job.num_processes) and type(its) is dict:
            return number, its, ""
    return -1, {}, f"is none of the {job.num_processes} processes of this job"


def _report(job: Job, alike: Mapping[str, Any], timeout_s: float) -> Connection:
    """Says to process 0 that this process is there."""
    deadline = time.monotonic() + timeout_s
    said = json.dumps((job.token, job.process_id, alike)).encode()
    while True:
        remaining_s = max(0.001, deadline - time.monotonic())
        try:
            caller = socket.create_connection((job.host, job.port), timeout=remaining_s)
            caller.settimeout(None)
            connection = Connection(caller.detach())
            connection.send_bytes(said)
            fault = _hear(connection, remaining_s + _LATE_S).decode()
            break
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                why = str(error) or "it says nothing"
                raise ValueError(
                    f"coordinator {job.address} of process 0 must answer within {timeout_s:g} s: {why}"
                ) from error
            time.sleep(_RETRY_S)
    if fault:
        raise ValueError(fault)
    return connection


def _hear(connection: Connection, timeout_s: float) -> bytes:
    """What the other end says; an OSError or EOFError if it has not said all of it in time, as a stranger may not."""
    until = time.monotonic() + timeout_s
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        timer = threading.Timer(timeout_s, ours.shutdown, (socket.SHUT_RDWR,))
        timer.start()
        try:
            said = connection.recv_bytes(_MAX_BYTES)
        finally:
            timer.cancel()
            timer.join()
    if time.monotonic() > until:  # the connection may be shut, even if all was said
        raise EOFError
    return said
