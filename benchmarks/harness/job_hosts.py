"""Ranks on all hosts of a job: its first process runs the benchmark, and has the others start ranks on their hosts.

| first process (``JobHosts``)     |    | every other process (``serve``)           |
|----------------------------------|----|-------------------------------------------|
| waits for all at the coordinator | <- | the name of its host, and its GPUs        |
| starts its ranks of a call       | -> | starts its own, as on one machine         |
| waits for all results            | <- | its results, or why a rank failed         |
| lets its ranks leave             | -> | lets its own leave; ends them if one fails |

Both exchange lines of JSON. Only the first process listens, at the coordinator's address, until all have come. When it
or its connection ends, the others end with their ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import jaxddp
from jaxddp.processes.job import Job, find_job, visible_gpus
from jaxddp.processes.roll_call import meet
from jaxddp.processes.torchrun import with_free_port
from torchref.launch import HostShare, OnMessage, RankError

from .exchange import dumps, find, loads, name_of

if TYPE_CHECKING:
    from .ranks import Ranks

BENCHMARKS = ("main", "strategies", "buckets", "collectives", "scaling", "gates")
_NO_JOB = "on (=job) must be in a job: start a process on each host with srun, torchrun or mpirun"
_JOIN_TIMEOUT_S = 300.0
_OTHER_FAILURES_S = 1.0  # one failure often causes others, and the earliest is reported
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_open: list[JobHosts] = []


class _Stopped(Exception):
    """Raised where ranks of this host run, when they are no longer wanted."""


def job_of(benchmark: str, on: str | None, resume: str | None) -> Job | None:
    """Finds the job that this process is part of, and leaves the process its own GPUs.

    Returns:
        The job; None if the benchmark does not run in one. A stopped run goes on in a job as it was called in one.

    Raises:
        ValueError: If there is none, or the benchmark does not run in one.
    """
    if on != "job" and not resume:
        return None
    if not resume and benchmark not in BENCHMARKS:
        raise ValueError(f"on (=job) is for {', '.join(BENCHMARKS)}, not for {benchmark}")
    job = find_job()
    if job is None:
        if resume:
            return None
        raise ValueError(_NO_JOB)
    if job.num_local_processes > 1 and (gpus := visible_gpus()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(job.local_devices(len(gpus))))
    return job


@contextlib.contextmanager
def hosts_for(on: str | None, job: Job | None, num_gpus: Callable[[], int]) -> Iterator[None]:
    """Keeps the hosts of a job together if a benchmark is to run on them.

    Raises:
        ValueError: As `JobHosts`, or if there is no job.
    """
    if on != "job":
        yield
    elif job is None:
        raise ValueError(_NO_JOB)
    else:
        with JobHosts(job, num_gpus()):
            yield


def open_hosts() -> JobHosts:
    """Returns the hosts of the job that this process runs a benchmark in; raises ValueError if there is none."""
    if not _open:
        raise ValueError("ranks of kind 'job' run on the hosts of a job, and this process is in none")
    return _open[-1]


def job_fields() -> dict[str, str]:
    """The fields of rows about the job: where its ranks run, and what started them; none outside of a job."""
    return {"job_hosts": _open[-1].where, "launcher": _open[-1].in_words} if _open else {}


class JobHosts:
    """The hosts of a job, each with ``num_gpus`` at least, seen by its first process; a context manager."""

    def __init__(self, job: Job, num_gpus: int) -> None:
        """Waits for the other processes.

        Raises:
            ValueError: As ``jaxddp.processes.roll_call.meet``, or if one ends at once.
        """
        self.job, self.num_hosts = job, job.num_processes
        self._calls = 0
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._gone: set[int] = set()
        self._connections = _join(job)
        for index, connection in self._connections.items():
            _listen(connection, lambda said, index=index: self._inbox.put((index, said)))  # type: ignore[misc]
        hosts = {0: _here(num_gpus)}
        while len(hosts) < self.num_hosts:
            index, hosts[index] = self._inbox.get()
            if hosts[index] is None:
                raise ValueError(f"process {index} of {self.num_hosts} has ended before the benchmark began")
        self.num_gpus = min(host["gpus"] for host in hosts.values())
        self._names = [hosts[index]["host"] for index in range(self.num_hosts)]

    def __enter__(self) -> JobHosts:
        """Makes these the hosts of ranks of kind ``job``."""
        _open.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        """Lets the other processes end."""
        _open.remove(self)
        for connection in self._connections.values():
            _send(connection, {"do": "end"})
            connection.close()

    @property
    def where(self) -> str:
        """How many processes there are on how many hosts."""
        hosts = f"{self.job.num_hosts} host{'s' * (self.job.num_hosts > 1)}"
        return hosts if self.num_hosts == self.job.num_hosts else f"{self.num_hosts} processes on {hosts}"

    @property
    def in_words(self) -> str:
        """All of it in a line."""
        return f"{self.job.launcher}: {self.where} ({', '.join(self._names)}), coordinator {self.job.host}"

    def run(
        self, ranks: Ranks, in_jax: bool, fn: Callable[..., Any], args: tuple[Any, ...], on_message: OnMessage | None
    ) -> list[Any]:
        """Runs ``fn(ranks, *args)`` in processes on the hosts of the ranks, and returns all results by rank.

        Raises:
            RankError: If a process fails anywhere, or a host is gone.
        """
        counts = ranks.processes(in_jax)
        peers = {index: self._connections[index] for index in range(1, len(counts))}
        self._calls, results = self._calls + 1, {}
        this = {"call": self._calls}

        def take(index: int, said: Any) -> None:
            if said is None:
                self._gone.add(index)
            if index in peers and index in self._gone:
                raise RankError(f"the process on {self._names[index]} ({index} of {self.num_hosts}) has ended")
            if index in peers and said["call"] == self._calls:
                if "failed" in said:
                    raise RankError(said["failed"], said["at_s"])
                results[index] = loads(said["results"])

        def check() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    take(*self._inbox.get_nowait())

        def finish(own: list[Any]) -> None:
            while len(results) < len(peers):
                take(*self._inbox.get())
            for peer in peers.values():
                _send(peer, this | {"do": "leave"})

        for index in self._gone:
            take(index, None)
        with self._store() as address:
            order = this | {"do": "run", "in_jax": in_jax, "fn": name_of(fn), "store": address}
            for peer in peers.values():
                _send(peer, order | {"args": dumps((ranks, *args))})
            share = HostShare(0, sum(counts), self._names[0], address, check, finish)
            try:
                own = ranks.launch_here(in_jax, fn, args, counts[0], share, on_message)
            except BaseException as error:
                failures = [error]
                deadline = time.monotonic() + _OTHER_FAILURES_S
                while isinstance(error, RankError) and (left := deadline - time.monotonic()) > 0 and peers:
                    try:
                        take(*self._inbox.get(timeout=left))
                    except RankError as other:
                        failures.append(other)
                    except queue.Empty:
                        break
                for peer in peers.values():
                    _send(peer, this | {"do": "stop"})
                raise min(failures, key=lambda one: getattr(one, "at_s", 0.0)) from None
        return own + [result for index in peers for result in results[index]]

    @contextlib.contextmanager
    def _store(self) -> Iterator[tuple[str, int]]:
        """Keeps a store open at which the ranks of a call meet; yields its host and port."""
        listener = self.job.listen(port=0)  # torch would listen on every interface
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            self.job.host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        yield self.job.host, port
        del store


def serve(job: Job, num_gpus: int) -> int:
    """Runs ranks on this host until the first process ends.

    Returns:
        The exit status: 0, or 1 if the first process did not end as it should.

    Raises:
        ValueError: As ``jaxddp.processes.roll_call.meet``.
    """
    connection = _join(job)[0]
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _listen(connection, inbox.put)
    _send(connection, _here(num_gpus))
    while (said := inbox.get()) is not None and said["do"] != "end":
        if said["do"] == "run":
            with contextlib.suppress(_Stopped):
                _run(job, said, connection, inbox)
    connection.close()
    if said is None:
        print(f"error: process 0 of {job.num_processes} has ended, or cannot be reached", file=sys.stderr)
        return 1
    return 0


def _run(job: Job, order: dict[str, Any], connection: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    """Runs the ranks of an order on this host, and sends their results or why they failed."""
    this = {"call": order["call"]}

    def check() -> None:
        if not inbox.empty():
            said = inbox.get()
            if said is None or said["do"] == "end":
                inbox.put(said)  # for the caller
            if said is None or said["do"] != "leave":
                raise _Stopped

    def finish(results: list[Any]) -> None:
        _send(connection, this | {"results": dumps(results)})
        while inbox.empty():
            time.sleep(0.05)
        check()

    ranks, *args = loads(order["args"])
    counts, index, in_jax = ranks.processes(order["in_jax"]), job.process_id, order["in_jax"]
    host, port = order["store"]
    share = HostShare(sum(counts[:index]), sum(counts), socket.gethostname(), (host, port), check, finish)
    try:
        ranks.launch_here(in_jax, find(order["fn"]), args, counts[index], share, None)
    except (RankError, ValueError, OSError) as error:
        at_s = error.at_s if isinstance(error, RankError) else time.time()
        _send(connection, this | {"failed": str(error), "at_s": at_s})


def _join(job: Job) -> dict[int, socket.socket]:
    """Meets all processes; has the ranks of this host communicate over the interface that leads to the coordinator."""
    alike: dict[str, Any] = {name: version(name) for name in ("jax", "torch")}
    alike |= {"jaxddp": jaxddp.__version__, "arguments": sys.argv[1:]}
    connections = meet(with_free_port(job, _JOIN_TIMEOUT_S), alike, _JOIN_TIMEOUT_S)
    for connection in connections.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":  # notices within half a minute that a host is gone
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
    address = next((connection.getsockname()[0] for connection in connections.values()), "127.0.0.1")
    if interface := _interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return connections


def _interface_of(address: str) -> str | None:
    """The network interface that has an address; None if it is not found."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address or (name == "lo" and address.startswith("127.")):
                    return name
    return None


def _here(num_gpus: int) -> dict[str, Any]:
    return {"host": socket.gethostname(), "gpus": num_gpus}


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the end of a connection is noticed where it is read
        connection.sendall(f"{json.dumps(message)}\n".encode())


def _listen(connection: socket.socket, put: Callable[[Any], None]) -> None:
    """Puts the messages of a connection, and None at its end."""

    def read() -> None:
        with contextlib.suppress(OSError, ValueError), connection.makefile() as lines:
            for line in lines:
                put(json.loads(line))
        put(None)

    threading.Thread(target=read, daemon=True).start()
