"""Starts N ranks as processes of this machine, collects their results, and ends them all; or joins a launcher's job.

When a rank raises, dies or is silent for too long, the others are killed: they may wait for it in a collective. Ranks
end with their parent, however it ends. They meet through a file, which ranks on other networks see as well. A pipe
carries pickled tasks to a rank, and back pickled ``(kind, content)``: messages, then a result or a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jaxddp.arguments import check_integer
from jaxddp.processes.job import Job, find_job_or, keep_to_loopback, print_line, waits
from jaxddp.processes.roll_call import address_here, meet
from jaxddp.processes.torchrun import with_free_port
from jaxddp.processes.watchdog import watch

_T = TypeVar("_T")

_LEAVE_TIMEOUT_S = 20.0
_open_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()
_send_message: Callable[[Any], None] | None = None  # in a rank, while a call runs


class RankError(RuntimeError):
    """A rank raised, died or did not finish: the first line says which and why, the rank's own traceback follows."""


def report(message: Any) -> None:
    """Sends a message from a running rank to its parent, if that has an ``on_message``."""
    if _send_message is not None:
        _send_message(message)


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """Processes that are kept to run functions as ranks again and again; a context manager.

    Rank r of every call is the same process. A call that fails costs its ranks' processes, not the pool.
    """

    def __init__(
        self,
        max_ranks: int,
        *,
        backend: str = "gloo",
        prepare: Callable[[int], None] | None = None,
        start_method: str = "spawn",
    ) -> None:
        """Makes a pool; starts nothing yet.

        ``max_ranks`` are the most that a call may have, on CPUs or, with ``"nccl"``, rank r on CUDA device r.
        ``prepare(rank)`` is called in each new process, before it starts a thread or joins a group.
        ``start_method`` is one of ``multiprocessing``: a ``"forkserver"`` imports torch once for all ranks.
        """
        _check_ranks(max_ranks, backend)
        self.max_ranks, self._backend, self._prepare = max_ranks, backend, prepare
        self._context: Any = multiprocessing.get_context(start_method)
        self._workers: dict[int, _Worker] = {}
        _open_pools.add(self)

    def run(
        self,
        fn: Callable[..., _T],
        *args: Any,
        num_ranks: int | None = None,
        timeout_s: float = 120.0,
        on_message: Callable[[int, Any], None] | None = None,
    ) -> list[_T]:
        """Runs ``fn(*args)`` on every rank of a fresh process group; gives the results in rank order.

        Args:
            fn: A function that other processes can import by its name; results are pickled and should be on the CPU.
            *args: Its arguments, the same on every rank.
            num_ranks: Size of the process group; ``max_ranks`` when None.
            timeout_s: Seconds within which all ranks must finish, counted anew whenever a rank reports or finishes.
            on_message: Called here as ``on_message(rank, message)`` when a rank calls ``report(message)``.

        Raises:
            RankError: If a rank raises, dies or does not finish in time.
        """
        ranks = range(check_integer("num_ranks", self.max_ranks if num_ranks is None else num_ranks))
        if len(ranks) > self.max_ranks:
            raise ValueError(f"num_ranks (={len(ranks)}) must be at most max_ranks (={self.max_ranks})")
        payload = pickle.dumps((fn, args))  # by value: shared memory would vanish with its rank
        with tempfile.TemporaryDirectory(prefix="torchref-") as folder:
            try:
                self._end([rank for rank, worker in self._workers.items() if not worker.process.is_alive()])
                missing = [rank for rank in ranks if rank not in self._workers]
                self._workers |= {rank: _Worker(self._context, rank, self._backend, self._prepare) for rank in missing}
                self._collect(missing, timeout_s=300.0)
                self._send(ranks, (len(ranks), f"{folder}/store", timeout_s, payload))
                results = self._collect(ranks, timeout_s, on_message)
                self._send(ranks, None)  # no rank leaves the group while another may still need it
                try:
                    self._collect(ranks, _LEAVE_TIMEOUT_S)
                except RankError:  # of many thousands of groups of Gloo's one was never gone
                    self._end(ranks)
                return results
            except BaseException:
                self._end(ranks)
                raise

    def close(self) -> None:
        """Ends all processes of the pool."""
        self._end(list(self._workers))

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, ranks: Sequence[int], task: Any) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):  # ``_collect`` notices a dead one
                self._workers[rank].pipe.send(task)

    def _collect(self, ranks: Sequence[int], timeout_s: float, on_message: Any = None) -> list[Any]:
        """Waits for a result of some ranks."""
        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, str, str]] = {}
        heard_s = time.monotonic()
        while waiting := {rank: self._workers[rank] for rank in ranks if rank not in results}:
            if has_failed := bool(failures):  # one often causes others, which may arrive first: the earliest is it
                time.sleep(0.1)
            else:  # not for long: processes forked by a dead rank can keep both of its sources open
                sources = [source for one in waiting.values() for source in (one.pipe, one.process.sentinel)]
                connection.wait(sources, 0.2)
            for rank, worker in waiting.items():
                for kind, content in worker.receive():
                    heard_s = time.monotonic()
                    if kind == "result":
                        results[rank] = content
                    elif kind == "failure":
                        failures.setdefault(rank, content)
                    elif on_message is not None:
                        on_message(rank, content)
            if has_failed:
                rank, (_, what, details) = min(failures.items(), key=lambda item: item[1][0])
                raise RankError(f"rank {rank} of {len(ranks)} failed: {what}\n\n{details}")
            if time.monotonic() > heard_s + timeout_s:
                late = [rank for rank in waiting if rank not in results]
                for rank in late:
                    self._workers[rank].process.terminate()  # and say on stderr where each of its threads is
                    self._workers[rank].process.join(timeout=2.0)
                which = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} of {len(ranks)}"
                raise RankError(f"{which} did not finish or report within timeout_s (={timeout_s})")
        return [results[rank] for rank in ranks]

    def _end(self, ranks: Sequence[int]) -> None:
        workers = [self._workers.pop(rank) for rank in ranks if rank in self._workers]
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def launch(
    fn: Callable[..., _T],
    *args: Any,
    num_ranks: int,
    backend: str = "gloo",
    prepare: Callable[[int], None] | None = None,
    timeout_s: float = 600.0,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[_T]:
    """Runs ``fn(*args)`` once on ranks of its own; arguments and errors are those of `RankPool` and its ``run``."""
    with RankPool(num_ranks, backend=backend, prepare=prepare) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, on_message=on_message)


@functools.cache
def shared_pool() -> RankPool:
    """The pool of 8 ranks that the tests of a session share; closed when the interpreter exits."""
    multiprocessing.set_forkserver_preload([__name__, "torch._dynamo"])  # the latter is for optimizers
    return RankPool(8, start_method="forkserver" if sys.platform == "linux" else "spawn")


@atexit.register  # registered after multiprocessing's hook and so run before it; that one waits for all processes
def _close_open_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


class _Worker:
    """The parent's handle on a rank's process."""

    def __init__(self, context: Any, rank: int, backend: str, prepare: Any) -> None:
        """Starts the process; its first result is that it is ready."""
        self.pipe, theirs = context.Pipe()
        # The kernel's death signal follows the thread that started a process; only the main one lives to the end.
        dies_with_thread = threading.current_thread() is threading.main_thread()
        arguments = theirs, rank, backend, prepare, dies_with_thread
        self.process = context.Process(target=_serve, args=arguments, name=f"rank-{rank}")
        self.process.start()
        theirs.close()

    def receive(self) -> Iterator[tuple[str, Any]]:
        """What the rank has sent so far, as (kind, content), up to its result or failure; or its death."""
        is_alive = self.process.is_alive()  # asked first: what it sent before it died still counts
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, content = self.pipe.recv()
                yield kind, content
                if kind != "message":  # a later death concerns the next call
                    return
        if not is_alive:
            code = self.process.exitcode or 0
            what = f"exited with code {code}"
            if code < 0:
                what = f"killed by signal {-code} ({signal.Signals(-code).name})"
            yield "failure", (0.0, what, "")


# Inside a rank's process.


def _serve(pipe: connection.Connection, rank: int, backend: str, prepare: Any, dies_with_thread: bool) -> None:
    """The main function of a rank's process: answers that it is ready, then runs what it is sent."""
    faulthandler.register(signal.SIGTERM, chain=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    if dies_with_thread and sys.platform == "linux":  # also where C code holds Python's lock, and no thread runs
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    one_at_a_time = threading.Lock()

    def send(kind: str, content: Any) -> None:
        message = pickle.dumps((kind, content))
        sys.stdout.flush()  # the process may be killed
        sys.stderr.flush()
        with one_at_a_time:
            pipe.send_bytes(message)

    def answer(run: Callable[..., Any], *args: Any) -> None:
        try:
            send("result", run(*args))
        except BaseException as error:  # or it does not pickle
            what = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
            when = time.monotonic()  # on the clock that all processes share
            send("failure", (when, what, "".join(traceback.format_exception(error))))

    # Before any thread starts, so that threads inherit what it sets.
    answer(prepare or (lambda rank: None), rank)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if sys.platform == "linux":
        # All ranks are here; Gloo would look up the host name, which laptops and containers often cannot resolve.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            if (task := pipe.recv()) is not None:
                answer(_run, rank, backend, functools.partial(send, "message"), *task)
            else:
                answer(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)  # the main thread may be waiting in a collective


def _run(
    rank: int, backend: str, send: Callable[[Any], None], num_ranks: int, store: str, timeout_s: float, payload: bytes
) -> Any:
    global _send_message
    torch.set_num_threads(1)
    fn, args = pickle.loads(payload)
    timeout = timedelta(seconds=min(timeout_s + 60, 1e7))  # the parent's message is better
    place: dict[str, Any] = {"rank": rank, "world_size": num_ranks, "device_id": _use_device(backend, rank)}
    dist.init_process_group(backend, store=dist.FileStore(store, num_ranks), timeout=timeout, **place)
    dist.barrier()  # no rank runs ahead, or leaves the group, while others are still connecting to it
    _send_message = send
    try:
        return fn(*args)
    finally:
        _send_message = None  # of threads that go on


# Processes that a launcher has started.


def init_from_env(
    backend: str | None = None,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float | None = None,
    stuck_s: float | None = None,
) -> torch.device:
    """Joins this process to the process group of its job; twin of ``jaxddp.start_process``.

    Without arguments the job is that of the launcher, torchrun, SLURM or Open MPI; outside any, a group of one process.
    Rank 0 prints a line about it, and at its end stays for as long as others go on without it. When another rank is
    killed, fails or no longer answers, this one prints a line about it and ends with status 5.

    Args:
        backend: ``"gloo"`` or ``"nccl"``; None takes NCCL if there are CUDA devices.
        coordinator_address: ``host:port`` of rank 0, for a job described by hand, as the next two.
        num_processes: Number of ranks.
        process_id: This process's rank, from 0.
        timeout_s: Seconds to wait for the other ranks; half of ``stuck_s``, 60 to 300, if None.
        stuck_s: Seconds that a rank may be silent, or the others wait in a collective that it has not started, as while
            one alone evaluates or saves; that of ``launch --stuck-s``, else 600, if None.

    Returns:
        This rank's device: with NCCL its GPU, by its number on the host.

    Raises:
        ValueError: If the job is incomplete, contradicts itself, or rank 0 cannot be reached.
    """
    timeout_s, stuck_s = waits(timeout_s, stuck_s)
    job = find_job_or(coordinator_address, num_processes, process_id)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    index = 0
    if backend == "nccl" and job is not None and job.num_local_processes > 1:
        index = (job.local_devices(torch.cuda.device_count()) or [0])[0]
    _check_ranks(index + 1, backend)
    device = _use_device(backend, index)
    if job is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        return device or torch.device("cpu")
    keep_to_loopback(job)
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if job.num_processes > 1:
        place = with_free_port(job, timeout_s)
        connections = meet(place, {"torch": torch.__version__}, timeout_s)
        watch(job, connections, stuck_s, count_collectives=_count_collectives)
        _use_gloo_at(address_here(place, connections))
    store = _store_of(job, has_agent, timedelta(seconds=timeout_s))
    # The watchdog comes first, which says who is stuck; backends abort after 10 (NCCL) or 30 minutes by themselves.
    timeout = timedelta(seconds=min(max(600.0 if backend == "nccl" else 1800.0, stuck_s + 60), 1e7))
    world: dict[str, Any] = {"rank": job.process_id, "world_size": job.num_processes, "device_id": device}
    dist.init_process_group(backend, store=store, timeout=timeout, **world)
    if backend == "gloo":
        # Gloo's threads may still hold tensors of the last collective, also after destroy_process_group, and dropping
        # one needs the interpreter, which aborts the process where it has begun to end (pytorch#179291).
        atexit.register(time.sleep, 0.2)
    if job.process_id == 0:
        kind = torch.cuda.get_device_name(device) if backend == "nccl" else "CPU device"
        print_line(f"torchref: {job.describe(f'1 x {kind}')}")
    return device or torch.device("cpu")


def _count_collectives() -> int:
    """The number of collectives that this rank has started in the job's group, by whatever program."""
    group = dist.group.WORLD
    return group._get_sequence_number_for_group() if group is not None else 0  # type: ignore[attr-defined]


def _store_of(job: Job, has_agent: bool, timeout: timedelta) -> dist.Store:
    """The store through which the ranks find each other: that of torchrun's agent, else rank 0 runs one."""
    listener = job.listen() if job.process_id == 0 and not has_agent else None  # torch would on every interface
    is_mine, number = listener is not None, None if listener is None else listener.detach()
    store = dist.TCPStore(
        job.host, job.port, is_master=is_mine, timeout=timeout, wait_for_workers=False, master_listen_fd=number
    )
    return dist.PrefixStore(f"torchref/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _use_gloo_at(address: str | None) -> None:
    """Has Gloo listen at the interface of an address instead of that of the host's name, unless the user chose one."""
    if sys.platform != "linux" or address is None:
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _check_ranks(num_ranks: int, backend: str) -> None:
    check_integer("num_ranks", num_ranks)
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"unknown backend {backend!r}: one of gloo, nccl")
    if backend == "nccl" and num_ranks > (num_devices := torch.cuda.device_count()):
        raise ValueError(f"num_ranks (={num_ranks}) must be at most the CUDA devices (={num_devices}) for NCCL")


def _use_device(backend: str, index: int) -> torch.device | None:
    """Selects a CUDA device for NCCL; None for Gloo."""
    if backend != "nccl":
        return None
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
