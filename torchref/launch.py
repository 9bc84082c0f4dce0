"""Starts N ranks as processes of this machine, collects their results, and ends them all.

| call                           | processes                                 | process group                        |
|--------------------------------|-------------------------------------------|--------------------------------------|
| ``RankPool(8).run(fn, ...)``   | started when first needed, kept           | a fresh one per call, of num_ranks   |
| ``launch(fn, ..., num_ranks)`` | started and ended with the call           | one                                  |
| ``init_from_env()``            | torchrun's or the cluster's, on any hosts | one, from the launcher's variables   |

When a rank raises, dies or is silent for too long, the others are killed: they may wait for it in a collective. Ranks
end with their parent, however it ends. They meet through a file, so no port is taken and no host name is resolved.

A pipe carries a pickled ``_Task`` to a rank, later an empty message: all ranks are done, leave the group. Back come
pickled ``(call, kind, content)``: messages, then a result or a failure. The number drops late messages of an earlier
call; a started process answers as call 0. Tensors are pickled by value: shared memory would vanish with its rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from jaxddp.arguments import check_function, check_integer, is_number
from jaxddp.processes.job import Job, find_job_or, keep_to_loopback, waits
from jaxddp.processes.roll_call import address_here, meet
from jaxddp.processes.stderr import print_line
from jaxddp.processes.torchrun import with_free_port
from jaxddp.processes.watchdog import watch

OnMessage = Callable[[int, Any], None]  # (rank, message)
Prepare = Callable[[int], None]  # (rank)

_T = TypeVar("_T")

_BACKENDS = ("gloo", "nccl")
_START_TIMEOUT_S = 300.0
_LAST_TENSORS_S = 0.2
_CLOSE_TIMEOUT_S = 5.0
_OTHER_FAILURES_S = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_WHILE_STARTING = (
    "It happened while the process started, which imports the main module again: a script must guard"
    ' what starts ranks with `if __name__ == "__main__":`.'
)
_open_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()
_send_message: Callable[[Any], None] | None = None  # set in a rank by each call


class RankError(RuntimeError):
    """A rank raised, died or did not finish: the first line says which and why, the rank's own traceback follows."""


def report(message: Any) -> None:
    """Sends a message from a running rank to its parent.

    Does nothing outside of a rank, or if the parent passed no ``on_message``.

    Example:
        >>> report({"step": 10, "loss": 0.5})
    """
    if _send_message is not None:
        _send_message(message)


class RankPool:
    """Processes that are kept to run functions as ranks again and again; a context manager.

    Rank r of every call is the same process, so module state and random number generators live on between calls.
    A call that fails costs its ranks' processes, not the pool.
    """

    def __init__(
        self, max_ranks: int, *, backend: str = "gloo", threads_per_rank: int = 1, prepare: Prepare | None = None
    ) -> None:
        """Makes a pool; starts nothing yet.

        Args:
            max_ranks: The most ranks that a call may have.
            backend: ``"gloo"`` (CPU) or ``"nccl"`` (rank r on CUDA device r).
            threads_per_rank: Threads that torch's CPU operations use inside each rank.
            prepare: Called as ``prepare(rank)`` in each new process, before it starts a thread or joins a group.

        Raises:
            ValueError: If a number is not positive, the backend is unknown, NCCL lacks a device per rank, or
                ``prepare`` does not pickle.
        """
        self.max_ranks = _check_ranks("max_ranks", max_ranks, backend)
        self.backend = backend
        self.threads_per_rank = check_integer("threads_per_rank", threads_per_rank)
        if prepare is not None:
            check_function("prepare", prepare, "a function of a rank, or None")
        _pickled(f"prepare (={prepare!r})", prepare)
        self.prepare = prepare
        self._workers: dict[int, _Worker] = {}
        self._num_calls = 0
        self._closed = False
        self._running = threading.Lock()
        self._parent_pid = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="torchref-")
        self._remove_folder = weakref.finalize(self, _remove, self._folder, _remove_with_parent(self._folder))
        _open_pools.add(self)

    def run(
        self,
        fn: Callable[..., _T],
        *args: Any,
        num_ranks: int | None = None,
        timeout_s: float = 120.0,
        on_message: OnMessage | None = None,
    ) -> list[_T]:
        """Runs ``fn(*args)`` on every rank of a fresh process group.

        Args:
            fn: A function that other processes can import by its name; its results should be on the CPU.
            *args: Its arguments, the same on every rank; pickled, like the results.
            num_ranks: Size of the process group; ``max_ranks`` when None. The other processes are not part of it.
            timeout_s: Seconds within which all ranks must finish, counted anew whenever a rank reports or finishes.
                The start of processes is not counted.
            on_message: Called here as ``on_message(rank, message)`` when a rank calls ``report(message)``.

        Returns:
            The results in rank order.

        Raises:
            RankError: If a rank raises, dies or does not finish in time.
            ValueError: If a number is out of range, ``fn`` or ``args`` do not pickle, or the pool is closed or busy.
        """
        num_ranks = check_integer("num_ranks", self.max_ranks if num_ranks is None else num_ranks)
        if num_ranks > self.max_ranks:
            raise ValueError(f"num_ranks (={num_ranks}) must be at most max_ranks (={self.max_ranks})")
        check_function("fn", fn)
        if not is_number(timeout_s) or not timeout_s > 0:
            raise ValueError(f"timeout_s (={timeout_s!r}) must be positive")
        if on_message is not None:
            check_function("on_message", on_message, "a function of a rank and its message, or None")
        payload = _pickled(f"fn (={fn!r}) and its arguments", (fn, args))
        if not self._running.acquire(blocking=False):
            raise ValueError("this RankPool is busy with another call: every thread needs a pool of its own")
        try:
            if self._closed:
                raise ValueError("this RankPool is closed")
            self._num_calls += 1
            try:
                return self._run(payload, num_ranks, timeout_s, on_message)
            except BaseException:
                self._end([worker for worker in self._workers.values() if worker.rank < num_ranks])
                raise
        finally:
            self._running.release()

    def close(self) -> None:
        """Ends all processes of the pool; harmless if done before."""
        if self._closed or os.getpid() != self._parent_pid:  # a forked copy of the parent must not end its ranks
            return
        self._closed = True
        for worker in self._workers.values():
            worker.pipe.close()
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for worker in self._workers.values():
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
        self._end(list(self._workers.values()))
        self._remove_folder()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, payload: bytes, num_ranks: int, timeout_s: float, on_message: OnMessage | None) -> list[Any]:
        self._end([worker for worker in self._workers.values() if not worker.process.is_alive()])
        missing = [rank for rank in range(num_ranks) if rank not in self._workers]
        for rank in missing:
            self._workers[rank] = _Worker(rank, self.threads_per_rank, self.prepare)
        self._collect(0, missing, num_ranks, _START_TIMEOUT_S, None)

        call, ranks = self._num_calls, range(num_ranks)
        store = os.path.join(self._folder, str(call))
        for rank in ranks:
            task = _Task(call, rank, num_ranks, self.backend, store, timeout_s, payload)
            self._workers[rank].send(pickle.dumps(task))
        results = self._collect(call, ranks, num_ranks, timeout_s, on_message)
        for rank in ranks:  # no rank leaves the group while another may still need it
            self._workers[rank].send(b"")
        return results

    def _collect(
        self, call: int, ranks: Sequence[int], num_ranks: int, timeout_s: float, on_message: OnMessage | None
    ) -> list[Any]:
        """Waits for the results of a call from some of its ranks."""
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        heard_s = time.monotonic()
        while len(results) < len(ranks):
            waiting = [self._workers[rank] for rank in ranks if rank not in results]
            if failures:
                # One failure often causes others, which may arrive first: the earliest is the cause.
                time.sleep(_OTHER_FAILURES_S)
                waiting = [worker for worker in waiting if worker.rank not in {failure.rank for failure in failures}]
            elif (remaining_s := heard_s + timeout_s - time.monotonic()) > 0:
                sources = [source for worker in waiting for source in (worker.pipe, worker.process.sentinel)]
                # Not for long: processes forked by a dead rank can keep both of its sources open.
                connection.wait(sources, min(remaining_s, 0.5))
            else:
                which = f"rank{'s' * (len(waiting) > 1)} {', '.join(str(worker.rank) for worker in waiting)}"
                raise RankError(f"{which} of {num_ranks} did not finish or report within timeout_s (={timeout_s})")
            had_failed = bool(failures)
            for worker in waiting:
                for kind, content in worker.receive(call):
                    heard_s = time.monotonic()
                    if kind == "result":
                        results[worker.rank] = content
                    elif kind == "failure":
                        failures.append(content)
                    elif on_message is not None:
                        on_message(worker.rank, content)
            if had_failed:
                cause = min(failures, key=lambda failure: failure.at_s)
                raise RankError(f"rank {cause.rank} of {num_ranks} failed: {cause.summary}\n\n{cause.details}")
        return [results[rank] for rank in ranks]

    def _end(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()
            self._workers.pop(worker.rank, None)


def launch(
    fn: Callable[..., _T],
    *args: Any,
    num_ranks: int,
    backend: str = "gloo",
    threads_per_rank: int = 1,
    prepare: Prepare | None = None,
    timeout_s: float = 600.0,
    on_message: OnMessage | None = None,
) -> list[_T]:
    """Runs ``fn(*args)`` once on ranks of its own: a `RankPool` for one call.

    The arguments are those of `RankPool` and ``RankPool.run``, and the results are in rank order.

    Raises:
        RankError: If a rank raises, dies or does not finish in time.
        ValueError: As `RankPool` and its ``run``.
    """
    _check_ranks("num_ranks", num_ranks, backend)
    with RankPool(num_ranks, backend=backend, threads_per_rank=threads_per_rank, prepare=prepare) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, on_message=on_message)


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
    Rank 0 prints one line about what was found. When another rank is killed, fails or no longer answers, this one
    prints a line about it and ends with status 5.

    Args:
        backend: ``"gloo"`` or ``"nccl"``; None takes NCCL if there are CUDA devices.
        coordinator_address: ``host:port`` of rank 0, for a job described by hand.
        num_processes: Number of ranks.
        process_id: This process's rank, from 0.
        timeout_s: Seconds to wait for the other ranks; half of ``stuck_s``, 60 to 300, if None.
        stuck_s: Seconds that a rank may be silent, or the others wait in a collective that it has not started, as while
            one alone evaluates or saves; that of ``launch --stuck-s``, else 600, if None.

    Returns:
        This rank's device: with NCCL its GPU, by its number on the host.

    Raises:
        ValueError: If the job is incomplete or contradicts itself, a number is out of range, the backend is unknown, a
            GPU is missing, or rank 0 cannot be reached.
    """
    timeout_s, stuck_s = waits(timeout_s, stuck_s)
    job = find_job_or(coordinator_address, num_processes, process_id)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    index = 0
    if backend == "nccl" and job is not None and job.num_local_processes > 1:
        index = (job.local_devices(torch.cuda.device_count()) or [0])[0]
    _check_ranks("the GPU of this process", index + 1, backend)
    device = _use_device(backend, index)
    if job is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        return device or torch.device("cpu")
    keep_to_loopback(job)
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if job.num_processes > 1:
        place = with_free_port(job, timeout_s) if has_agent else job
        connections = meet(place, {"torch": torch.__version__}, timeout_s)
        watch(job, connections, stuck_s, count_collectives=_count_collectives)
        _use_gloo_at(address_here(place, connections))
    store = _store_of(job, has_agent, timedelta(seconds=timeout_s))
    dist.init_process_group(backend, store=store, rank=job.process_id, world_size=job.num_processes, device_id=device)
    if backend == "gloo":
        # Gloo's threads may still hold tensors of the last collective, also after destroy_process_group, and dropping
        # one needs the interpreter, which aborts the process where it has begun to end (pytorch#179291).
        atexit.register(time.sleep, _LAST_TENSORS_S)
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
    listener = None
    if job.process_id == 0 and not has_agent:
        listener = job.listen()  # torch would listen on every interface
    store = dist.TCPStore(
        job.host,
        job.port,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
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
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


@functools.cache
def shared_pool() -> RankPool:
    """The pool of 8 ranks that the tests of a session share; closed when the interpreter exits."""
    return RankPool(8)


def _check_ranks(name: str, num_ranks: int, backend: str) -> int:
    num_ranks = check_integer(name, num_ranks)
    if backend not in _BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: one of {', '.join(_BACKENDS)}")
    num_devices = torch.cuda.device_count() if backend == "nccl" else num_ranks
    if num_ranks > num_devices:
        raise ValueError(f"{name} (={num_ranks}) must be at most the number of CUDA devices (={num_devices}) for NCCL")
    return num_ranks


def _use_device(backend: str, index: int) -> torch.device | None:
    """Selects a CUDA device for NCCL; None for Gloo."""
    if backend != "nccl":
        return None
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ValueError(f"{name} must pickle: {str(error).splitlines()[0]}") from error


@atexit.register  # registered after multiprocessing's hook and so run before it; that one waits for all processes
def _close_open_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


def _remove_with_parent(folder: str) -> subprocess.Popen[bytes]:
    """Starts a process that removes a folder when its standard input ends: when this process does, even if killed."""
    command = ["sh", "-c", 'cat > /dev/null; rm -rf "$0"', folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C does not reach it


def _remove(folder: str, remover: subprocess.Popen[bytes]) -> None:
    assert remover.stdin is not None
    remover.stdin.close()
    remover.wait()
    shutil.rmtree(folder, ignore_errors=True)


class _Task(NamedTuple):
    """A function to run on a rank, and the process group to run it in."""

    call: int
    rank: int
    num_ranks: int
    backend: str
    store: str  # a file
    timeout_s: float
    payload: bytes  # pickled (fn, args)


class _Failure(NamedTuple):
    """Why a rank has no result."""

    rank: int
    at_s: float  # on the clock that all processes of the machine share; 0 of a death
    summary: str
    details: str


class _Worker:
    """The parent's handle on a rank's process."""

    def __init__(self, rank: int, threads_per_rank: int, prepare: Prepare | None) -> None:
        """Starts the process; it answers call 0 when it is ready."""
        context = multiprocessing.get_context("spawn")
        # The kernel's death signal follows the thread that started a process; only the main one lives to the end.
        parent_pid = os.getpid() if threading.current_thread() is threading.main_thread() else None
        self.rank = rank
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(child_pipe, parent_pid, rank, threads_per_rank, prepare), name=f"rank-{rank}"
        )
        self.process.start()
        child_pipe.close()

    def send(self, message: bytes) -> None:
        """Sends to the process; ``receive`` notices a dead one."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(message)

    def receive(self, call: int) -> list[tuple[str, Any]]:
        """What the rank has sent for a call so far, as (kind, content), up to its result or failure; or its death."""
        died, received = not self.process.is_alive(), []  # asked first: what it sent before it died still counts
        try:
            while self.pipe.poll():
                its_call, kind, content = pickle.loads(self.pipe.recv_bytes())
                if its_call == call:
                    received.append((kind, content))
                    if kind != "message":  # a later death concerns the next call
                        return received
        except (EOFError, OSError):
            died = True
        if died:
            self.process.join(1.0)
            code = self.process.exitcode
            summary = "closed its pipe" if code is None else f"exited with code {code}"
            if code is not None and code < 0:
                summary = f"killed by signal {-code} ({signal.Signals(-code).name})"
            received.append(("failure", _Failure(self.rank, 0.0, summary, "" if call else _WHILE_STARTING)))
        return received


# Inside a rank's process.


def _serve(
    pipe: connection.Connection, parent_pid: int | None, rank: int, threads_per_rank: int, prepare: Prepare | None
) -> None:
    """The main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    if parent_pid is not None and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # the parent ended before the call
            os._exit(1)
    if prepare is not None:
        try:
            prepare(rank)  # before any thread starts, so that threads inherit what it sets
        except BaseException as error:
            pipe.send_bytes(pickle.dumps((0, "failure", _describe(rank, error))))
            return
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_tasks, args=(pipe, tasks), daemon=True).start()
    if sys.platform == "linux":
        # Gloo would look up the host name, which laptops and containers often cannot resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    one_at_a_time = threading.Lock()

    def send(call: int, kind: str, content: Any) -> None:
        message = pickle.dumps((call, kind, content))
        with one_at_a_time:
            pipe.send_bytes(message)

    send(0, "result", None)
    while True:
        if received := tasks.get():
            torch.set_num_threads(threads_per_rank)
            _run(pickle.loads(received), send)
        elif dist.is_initialized():
            dist.destroy_process_group()


def _read_tasks(pipe: connection.Connection, tasks: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks.put(pipe.recv_bytes())
    os._exit(0)  # the parent is gone or has closed the pool; the main thread may be waiting in a collective


def _run(task: _Task, send: Callable[[int, str, Any], None]) -> None:
    global _send_message
    try:
        fn, args = pickle.loads(task.payload)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are here
        dist.init_process_group(
            task.backend,
            store=dist.FileStore(task.store, task.num_ranks),
            rank=task.rank,
            world_size=task.num_ranks,
            timeout=timedelta(seconds=min(task.timeout_s + 60, 1e7)),  # the parent's message is better
            device_id=_use_device(task.backend, task.rank),
        )
        dist.barrier()  # no rank runs ahead, or leaves the group, while others are still connecting to it
        _send_message = functools.partial(send, task.call, "message")
        kind, content = "result", fn(*args)
    except BaseException as error:
        kind, content = "failure", _describe(task.rank, error)
    sys.stdout.flush()  # the process ends with os._exit, which does not flush
    sys.stderr.flush()
    try:
        send(task.call, kind, content)
    except Exception as error:  # the result does not pickle
        send(task.call, "failure", _describe(task.rank, error))


def _describe(rank: int, error: BaseException) -> _Failure:
    at_s, frames = time.monotonic(), error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # without this file's own frame
    details = "".join(traceback.format_exception(type(error), error, frames))
    lines = str(error).splitlines()
    return _Failure(rank, at_s, f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, details)
