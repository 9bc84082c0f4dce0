"""All processes of a job say that they are there, before a framework connects them.

``jax.distributed.initialize`` aborts every process if one is missing, without its number, and a second process with a
rank that exists aborts a job that runs. Here process 0 listens at the coordinator's address. Each other process sends
one line of JSON with the job's token. Strangers and second processes of a rank are sent away with a line, and the
meeting goes on. When all have come, process 0 compares what they bring, and answers each with an empty line, or the
error that all of them raise.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .job import Job
from .stderr import print_line

_RETRY_S = 0.1
_HELLO_S = 5.0  # in which a caller must have said who it is
_MAX_BYTES = 65536  # of its line


def meet(job: Job, alike: Mapping[str, Any], timeout_s: float) -> dict[int, socket.socket]:
    """Waits for all processes of a job, and compares what they bring; every process calls it.

    ``alike`` must be the same in all processes, such as versions; JSON values.

    Returns:
        In process 0 a connection to each other process, by its number; in the others that to process 0.

    Raises:
        ValueError: If the coordinator's port is taken or nobody answers there, processes do not come within the
            timeout, this one is refused, or they disagree.
    """
    if job.process_id == 0:
        return _Meeting(job, alike).wait(timeout_s)
    return {0: _report(job, alike, timeout_s)}


def address_here(job: Job, connections: Mapping[int, socket.socket]) -> str | None:
    """The address at which the other processes reach this one, by the connections of ``meet``.

    None if processes of this host alone have used one, and others may not reach it.
    """
    addresses = sorted({connection.getsockname()[0] for connection in connections.values()}, key=_is_loopback)
    is_known = addresses and (not _is_loopback(addresses[0]) or _is_loopback(job.bind_host))
    return addresses[0] if is_known else None


def disagreement(said: Sequence[Mapping[str, Any]], who: str = "process", numbers: Sequence[int] | None = None) -> str:
    """Gives one line about the first entry that is not the same in all, naming who differs from the first; else "".

    ``said`` are JSON values, ``who`` is what brings them, with ``numbers`` from 0 if None.

    Example:
        >>> disagreement([{"jax": 1}, {"jax": 2}, {"jax": 2}])
        'jax (=2 in process 1, 2) must be 1, as in process 0'
    """
    numbers = range(len(said)) if numbers is None else numbers
    for name in dict.fromkeys(name for one in said for name in one):
        expected, *others = (one.get(name, "absent") for one in said)
        unlike: dict[str, list[str]] = {}
        for number, value in zip(numbers[1:], others, strict=True):
            if value != expected:
                unlike.setdefault(repr(value), []).append(str(number))
        if unlike:
            found = "; ".join(f"{value} in {who} {', '.join(where)}" for value, where in unlike.items())
            return f"{name} (={found}) must be {expected!r}, as in {who} {numbers[0]}"
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


class _Meeting:
    """Process 0's side: a thread hears each caller."""

    def __init__(self, job: Job, alike: Mapping[str, Any]) -> None:
        self._job, self._lock, self._is_over = job, threading.Lock(), False
        self._came: dict[int, Mapping[str, Any]] = {0: alike}
        self._connections: dict[int, socket.socket] = {}

    def wait(self, timeout_s: float) -> dict[int, socket.socket]:
        job, deadline = self._job, time.monotonic() + timeout_s
        try:
            listener = job.listen()
        except OSError as error:
            why = error.strerror or error
            raise ValueError(
                f"coordinator {job.address} cannot listen ({why}): set MASTER_ADDR and MASTER_PORT"
            ) from error
        with listener:
            listener.settimeout(_RETRY_S)
            while len(self._came) < job.num_processes and time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # nobody called, or has left already
                    threading.Thread(target=self._hear, args=listener.accept()[:1], daemon=True).start()
        with self._lock:
            self._is_over = True
        numbers = sorted(self._came)
        fault = disagreement([self._came[number] for number in numbers], numbers=numbers)
        if missing := [str(number) for number in range(job.num_processes) if number not in self._came]:
            missed = f"process {', '.join(missing)} of {job.num_processes}"
            fault = f"{missed} must join at {job.address} within {timeout_s:g} s"
        for connection in self._connections.values():
            _answer(connection, fault)
        if fault:
            for connection in self._connections.values():
                connection.close()
            raise ValueError(fault)
        return self._connections

    def _hear(self, caller: socket.socket) -> None:
        number, alike = 0, {}
        try:
            number, alike = _introduction(_read_line(caller, _HELLO_S), self._job)
            refusal = ""
        except OSError:
            refusal = f"must say within {_HELLO_S:g} s which process of the job it is"
        except ValueError as error:
            refusal = str(error)
        with self._lock:
            if not refusal and (self._is_over or number in self._came):
                refusal = f"process_id (={number}) must be one process's: two have joined under it"
            if not refusal:
                self._connections[number] = caller
                self._came[number] = alike  # last: then the meeting may be over
                return
        with caller, contextlib.suppress(OSError):
            print_line(f"jaxddp: {caller.getpeername()[0]} is refused at {self._job.address}: {refusal}")
            _answer(caller, refusal)


def _introduction(line: str, job: Job) -> tuple[int, Mapping[str, Any]]:
    """The number of the process that says this, and what it brings; raises a ValueError if it is refused."""
    try:
        said = json.loads(line)
        token, number, count, alike = (said[name] for name in ("token", "process_id", "num_processes", "alike"))
        is_known = hmac.compare_digest(token.encode(), job.token.encode())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_known = False
    if not is_known or type(number) is not int or type(count) is not int or not isinstance(alike, dict):
        raise ValueError("is no process of this job")
    if count != job.num_processes:
        raise ValueError(f"num_processes (={count} in process {number}) must be {job.num_processes}, as in process 0")
    if not 0 < number < count:
        raise ValueError(f"process_id (={number}) must be above 0 and below {count}")
    return number, alike


def _answer(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def _report(job: Job, alike: Mapping[str, Any], timeout_s: float) -> socket.socket:
    """Says to process 0 that this process is there."""
    deadline = time.monotonic() + timeout_s
    said = {"token": job.token, "process_id": job.process_id, "num_processes": job.num_processes, "alike": alike}
    while True:
        connection, remaining = None, max(0.001, deadline - time.monotonic())
        try:
            connection = socket.create_connection((job.host, job.port), timeout=remaining)
            connection.sendall(f"{json.dumps(said)}\n".encode())
            fault = _read_line(connection, remaining + 5)  # process 0 names those that are missing
            break
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() > deadline:
                raise ValueError(
                    f"coordinator {job.address} of process 0 must answer within {timeout_s:g} s: {error}"
                ) from error
            time.sleep(_RETRY_S)
    if fault:
        connection.close()
        raise ValueError(fault)
    return connection


def _read_line(connection: socket.socket, within_s: float) -> str:
    line, deadline = b"", time.monotonic() + within_s
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(1)  # what follows the line is for whoever gets the connection
        if not part or len(line) > _MAX_BYTES:
            raise ConnectionError("the connection ended within a message")
        line += part
    return line.decode(errors="replace").strip()
