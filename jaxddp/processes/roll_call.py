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
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .job import Job
from .stderr import print_line

_RETRY_S = 0.1
_HELLO_S = 5.0  # in which a caller must have said who it is
_MAX_BYTES = 65536  # of its line
_MAX_STRANGERS = 64  # that may be connected at once


def meet(job: Job, alike: Mapping[str, Any], timeout_s: float) -> dict[int, socket.socket]:
    """Waits for all processes of a job, and compares what they bring; every process calls it.

    ``alike`` must be the same in all processes, such as versions; JSON values.

    Returns:
        In process 0 a connection to each other process, by its number; in the others that to process 0.

    Raises:
        ValueError: If the coordinator's port is taken or nobody answers there, processes do not come within the
            timeout, this one is refused, or they disagree.
    """
    deadline = time.monotonic() + timeout_s
    if job.process_id == 0:
        return _Meeting(job, alike).wait(deadline, timeout_s)
    return {0: _report(job, alike, deadline, timeout_s)}


def address_here(job: Job, connections: Mapping[int, socket.socket]) -> str | None:
    """The address at which the other processes reach this one, by the connections of ``meet``.

    None if processes of this host alone have used one, and others may not reach it.
    """
    addresses = sorted({connection.getsockname()[0] for connection in connections.values()}, key=_is_loopback)
    is_known = addresses and (not _is_loopback(addresses[0]) or _is_loopback(job.bind_host))
    return addresses[0] if is_known else None


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


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


class _Meeting:
    """Process 0's side."""

    def __init__(self, job: Job, alike: Mapping[str, Any]) -> None:
        self.job, self.selector = job, selectors.DefaultSelector()
        self.came: dict[int, Mapping[str, Any]] = {0: alike}
        self.connections: dict[int, socket.socket] = {}
        self.callers: dict[socket.socket, tuple[bytes, float]] = {}  # what each has said, and until when it may

    def wait(self, deadline: float, timeout_s: float) -> dict[int, socket.socket]:
        job, fault = self.job, ""
        try:
            listener = job.listen()
        except OSError as error:
            why = error.strerror or error
            raise ValueError(
                f"coordinator {job.address} cannot listen ({why}): set MASTER_ADDR and MASTER_PORT"
            ) from error
        with listener, self.selector:
            self.selector.register(listener, selectors.EVENT_READ)
            while len(self.came) < job.num_processes and (now := time.monotonic()) < deadline:
                for key, _ in self.selector.select(_RETRY_S):
                    if key.fileobj is listener:
                        self._accept(listener, now)
                    elif key.data is not None:  # one that has come says more, so it has left
                        self._drop(self.connections.pop(key.data))
                        del self.came[key.data]
                    else:
                        self._read(key.fileobj)
                for caller in [one for one, (_, until) in self.callers.items() if now > until]:
                    self._refuse(caller, f"must say within {_HELLO_S:g} s which process it is")
        for caller in self.callers:
            caller.close()
        if missing := [str(index) for index in range(job.num_processes) if index not in self.came]:
            fault = (
                f"process {', '.join(missing)} of {job.num_processes} must join at {job.address} within {timeout_s:g} s"
            )
        numbers = sorted(self.came)
        fault = fault or disagreement([self.came[index] for index in numbers], numbers=numbers)
        for connection in self.connections.values():
            _answer(connection, fault)
            if fault:
                connection.close()
        if fault:
            raise ValueError(fault)
        return self.connections

    def _accept(self, listener: socket.socket, now: float) -> None:
        with contextlib.suppress(OSError):  # it has left already
            caller, _ = listener.accept()
            caller.setblocking(False)
            if len(self.callers) >= _MAX_STRANGERS + self.job.num_processes:
                caller.close()
                return
            self.callers[caller] = b"", now + _HELLO_S
            self.selector.register(caller, selectors.EVENT_READ)

    def _read(self, caller: Any) -> None:
        said, until = self.callers[caller]
        try:
            data = caller.recv(_MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if not data or len(said) > _MAX_BYTES:
            self._refuse(caller, "is no process of this job")
        elif said.endswith(b"\n"):
            self._hear(caller, said)
        else:
            self.callers[caller] = said, until

    def _hear(self, caller: socket.socket, line: bytes) -> None:
        number, refusal = _introduction(line, self.job)
        if not refusal and number in self.came:
            refusal = f"process_id (={number}) must be one process's: two have joined under it"
        if refusal:
            self._refuse(caller, refusal)
            return
        self.came[number], self.connections[number] = json.loads(line)["alike"], caller
        del self.callers[caller]
        self.selector.modify(caller, selectors.EVENT_READ, number)

    def _refuse(self, caller: socket.socket, why: str) -> None:
        with contextlib.suppress(OSError):
            print_line(f"jaxddp: {caller.getpeername()[0]} is refused at {self.job.address}: {why}")
        _answer(caller, why)
        del self.callers[caller]
        self._drop(caller)

    def _drop(self, caller: socket.socket) -> None:
        self.selector.unregister(caller)
        caller.close()


def _introduction(line: bytes, job: Job) -> tuple[int, str]:
    """The number of the process that says this, and why it is refused, if it is."""
    try:
        said = json.loads(line)
        token, number, count = said["token"], said["process_id"], said["num_processes"]
        is_known = hmac.compare_digest(token.encode(), job.token.encode())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_known = False
    if not is_known or type(number) is not int or type(count) is not int or not isinstance(said.get("alike"), dict):
        return 0, "is no process of this job"
    if count != job.num_processes:
        return 0, f"num_processes (={count} in process {number}) must be {job.num_processes}, as in process 0"
    if not 0 < number < count:
        return 0, f"process_id (={number}) must be above 0 and below {count}"
    return number, ""


def _answer(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def _report(job: Job, alike: Mapping[str, Any], deadline: float, timeout_s: float) -> socket.socket:
    """Says to process 0 that this process is there."""
    said = {"token": job.token, "process_id": job.process_id, "num_processes": job.num_processes, "alike": alike}
    while True:
        remaining = max(0.001, deadline - time.monotonic())
        connection = None
        try:
            connection = socket.create_connection((job.host, job.port), timeout=remaining)
            connection.sendall(f"{json.dumps(said)}\n".encode())
            error = _read_line(connection, deadline + 5)  # process 0 names those that are missing
            break
        except OSError as error_:
            if connection is not None:
                connection.close()
            if time.monotonic() > deadline:
                raise ValueError(
                    f"coordinator {job.address} of process 0 must answer within {timeout_s:g} s: {error_}"
                ) from error_
            time.sleep(_RETRY_S)
    if error:
        connection.close()
        raise ValueError(error)
    return connection


def _read_line(connection: socket.socket, deadline: float) -> str:
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(1)  # what follows the line is for whoever gets the connection
        if not part or len(line) > _MAX_BYTES:
            raise ConnectionError("the connection ended within a message")
        line += part
    return line.decode(errors="replace").strip()
