"""All processes of a job say that they are there: a framework's own rendezvous hangs or aborts when one is missing.

Process 0 listens at the coordinator's address. Each other process connects and sends one line of JSON, what it brings.
When all have come, process 0 compares, and answers each with an empty line or the error that all of them raise.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .job import Job

_RETRY_S = 0.1
_MAX_BYTES = 65536  # of a message; a stranger may connect


def meet(job: Job, alike: Mapping[str, Any], devices: list[str], timeout_s: float) -> dict[int, socket.socket]:
    """Waits for all processes of a job, and compares what they bring; every process calls it.

    ``alike`` must be the same in all processes, such as versions; JSON values. ``devices`` are the names of the GPUs
    that this process takes on its host; no other process may take one of them.

    Returns:
        In process 0 a connection to each other process, by its number; in the others that to process 0.

    Raises:
        ValueError: If the coordinator's port is taken or nobody answers there, processes do not come within the
            timeout, one is there twice, they disagree, or two of one host take the same GPU.
    """
    deadline = time.monotonic() + timeout_s
    said = {
        "process_id": job.process_id,
        "host": socket.gethostname(),
        "alike": {"num_processes": job.num_processes, **alike},
        "devices": devices,
    }
    if job.process_id == 0:
        return _answer(job, said, deadline, timeout_s)
    return {0: _report(job, said, deadline, timeout_s)}


def address_here(job: Job, connections: Mapping[int, socket.socket]) -> str | None:
    """The address at which the other processes reach this one, by the connections of ``meet``.

    None if processes of this host alone have used one, and others may not reach it.
    """
    addresses = sorted({connection.getsockname()[0] for connection in connections.values()}, key=_is_loopback)
    is_known = addresses and (not _is_loopback(addresses[0]) or _is_loopback(job.bind_host))
    return addresses[0] if is_known else None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def disagreement(said: Sequence[Mapping[str, Any]], who: str = "process", numbers: Sequence[int] | None = None) -> str:
    """Compares what processes, or what ``who`` calls them, bring: entries that must be the same in all; JSON values.

    ``numbers`` are those of the processes, from 0 if None.

    Returns:
        One line about the first entry that differs, which names all processes that differ from the first; empty if
        none does.

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


def _answer(job: Job, said: dict[str, Any], deadline: float, timeout_s: float) -> dict[int, socket.socket]:
    came: dict[int, tuple[dict[str, Any], socket.socket | None]] = {0: (said, None)}
    with contextlib.ExitStack() as stack, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((job.bind_host, job.port))
            listener.listen(job.num_processes)
        except OSError as error:
            raise ValueError(
                f"coordinator {job.host}:{job.port} cannot listen ({error.strerror}): set MASTER_ADDR and MASTER_PORT"
            ) from error
        fault = ""
        while len(came) < job.num_processes and not fault:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [str(index) for index in range(job.num_processes) if index not in came]
                fault = (
                    f"process {', '.join(missing)} of {job.num_processes} must join at {job.host}:{job.port} within "
                    f"{timeout_s:g} s"
                )
                continue
            connection.settimeout(1)
            try:
                heard = _parsed(_read_line(connection))
            except (OSError, ValueError):  # a stranger
                connection.close()
                continue
            stack.enter_context(connection)
            process_id = heard["process_id"]
            if process_id in came:
                fault = f"process_id (={process_id}) must be one process's: two have joined under it"
            came[process_id] = heard, connection
        fault = fault or _disagreement([came[index][0] for index in sorted(came)])
        for _, answer_to in came.values():
            if answer_to is not None:
                with contextlib.suppress(OSError):
                    answer_to.sendall(f"{fault}\n".encode())
        if fault:
            raise ValueError(fault)
        stack.pop_all()  # the connections stay open
    return {index: connection for index, (_, connection) in came.items() if connection is not None}


def _report(job: Job, said: dict[str, Any], deadline: float, timeout_s: float) -> socket.socket:
    while True:
        remaining = max(0.001, deadline - time.monotonic())
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(socket.create_connection((job.host, job.port), timeout=remaining))
                connection.sendall(f"{json.dumps(said)}\n".encode())
                connection.settimeout(remaining + 5)  # process 0 names those that are missing
                error = _read_line(connection)
                if not error.strip():
                    stack.pop_all()
                break
        except OSError as error_:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"coordinator {job.host}:{job.port} of process 0 must answer within {timeout_s:g} s: {error_}"
                ) from error_
            time.sleep(_RETRY_S)
    if error.strip():
        raise ValueError(error.strip())
    return connection


def _parsed(line: str) -> dict[str, Any]:
    said = json.loads(line)
    kinds = {"process_id": int, "host": str, "alike": dict, "devices": list}
    if not isinstance(said, dict) or any(type(said.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError("not a process of the job")
    return said


def _read_line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1)  # what follows the line is for whoever gets the connection
        if not part or len(line) > _MAX_BYTES:
            raise ConnectionError("the connection ended within a message")
        line += part
    return line.decode()


def _disagreement(said: list[dict[str, Any]]) -> str:
    """One line about the first thing in which processes disagree; empty if they agree."""
    numbers = [other["process_id"] for other in said]
    if fault := disagreement([other["alike"] for other in said], numbers=numbers):
        return fault
    takers: dict[tuple[str, str], int] = {}
    for other in said:
        for device in other["devices"]:
            first = takers.setdefault((other["host"], device), other["process_id"])
            if first != other["process_id"]:
                both = f"{first} and {other['process_id']}"
                return f"GPU {device} of {other['host']} must be one process's: {both} both take it"
    return ""
