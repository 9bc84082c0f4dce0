"""Starts N ranks as processes of this machine, collects their results, and ends them all.

| call                           | processes                                 | process group                        |
|--------------------------------|-------------------------------------------|--------------------------------------|
| ``RankPool(8).run(fn, ...)``   | started when first needed, kept           | a fresh one per call, of num_ranks   |
| ``launch(fn, ..., num_ranks)`` | started and ended with the call           | one                                  |
| ``init_from_env()``            | torchrun's or the cluster's, on any hosts | one, from RANK, WORLD_SIZE, ...      |

Nothing hangs and nothing stays behind. A rank that raises or dies ends the others at once, which may be waiting for
it in a collective; so does a timeout, of ranks that say nothing. Ranks end with their parent, however it ends: they
read the end of its pipe, and on Linux the kernel kills them. The ranks meet through a file, so no port is taken and no
host name is resolved.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, TypeVar

from .rank_process import OnMessage, Prepare, RankProcess, Task, pickled, receive_all, send_message

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

_BACKENDS = ("gloo", "nccl")
_START_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 5.0
_open_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


class RankError(RuntimeError):
    """A rank raised, died or did not finish: the first line says which and why, the rank's own traceback follows."""


def report(message: Any) -> None:
    """Sends a message from inside a rank to its parent, which gets it while the rank goes on.

    Outside of a rank, and where the parent passed no ``on_message``, nothing happens.

    Args:
        message: Anything that pickles.

    Example:
        >>> report({"step": 10, "loss": 0.5})
    """
    send_message(message)


class RankPool:
    """Processes that stay, to run functions as ranks again and again; a context manager.

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
        _check_ranks("max_ranks", max_ranks, backend)
        _check_positive("threads_per_rank", threads_per_rank)
        self.max_ranks = max_ranks
        self.backend = backend
        self.threads_per_rank = threads_per_rank
        pickled(f"prepare (={prepare!r})", prepare)
        self.prepare = prepare
        self._workers: dict[int, RankProcess] = {}
        self._num_calls = 0
        self._closed = False
        self._running = threading.Lock()
        self._parent_pid = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="torchref-")
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
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
            num_ranks: Size of the process group; ``max_ranks`` when None. The other processes stay out of it.
            timeout_s: Seconds until all must have finished; they begin anew whenever a rank reports or finishes. The
                start of processes is not counted.
            on_message: Called here as ``on_message(rank, message)`` when a rank calls ``report(message)``.

        Returns:
            The results in rank order.

        Raises:
            RankError: If a rank raises, dies or does not finish in time.
            ValueError: If a number is out of range, ``fn`` or ``args`` do not pickle, or the pool is closed or busy.
        """
        num_ranks = self.max_ranks if num_ranks is None else num_ranks
        _check_positive("num_ranks", num_ranks)
        if num_ranks > self.max_ranks:
            raise ValueError(f"num_ranks (={num_ranks}) must be at most max_ranks (={self.max_ranks})")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s (={timeout_s}) must be positive")
        payload = pickled(f"fn (={fn!r}) and its arguments", (fn, args))
        if not self._running.acquire(blocking=False):
            raise ValueError("this RankPool is busy with another call: every thread needs a pool of its own")
        try:
            if self._closed:
                raise ValueError("this RankPool is closed")
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
        """Returns the pool."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the pool."""
        self.close()

    def _run(self, payload: bytes, num_ranks: int, timeout_s: float, on_message: OnMessage | None) -> list[Any]:
        self._end([worker for worker in self._workers.values() if not worker.process.is_alive()])
        missing = [rank for rank in range(num_ranks) if rank not in self._workers]
        for rank in missing:
            self._workers[rank] = RankProcess(rank, self.threads_per_rank, self.prepare)
        self._collect(missing, num_ranks, 0, _START_TIMEOUT_S, None)

        self._num_calls += 1
        call, store_path = self._num_calls, os.path.join(self._folder, str(self._num_calls))
        for rank in range(num_ranks):
            self._workers[rank].send(Task(call, rank, num_ranks, self.backend, store_path, timeout_s, payload))
        results = self._collect(range(num_ranks), num_ranks, call, timeout_s, on_message)
        for rank in range(num_ranks):  # only now may they leave the group: the others could still have needed them
            self._workers[rank].send(None)
        return results

    def _collect(
        self, ranks: Sequence[int], num_ranks: int, call: int, timeout_s: float, on_message: OnMessage | None
    ) -> list[Any]:
        """Waits for the results of a call from some of its ranks."""
        began_s = time.monotonic()
        results: dict[int, Any] = {}
        while waiting := [self._workers[rank] for rank in ranks if rank not in results]:
            heard_s = max(self._workers[rank].heard_s for rank in ranks)
            remaining_s = max(began_s, heard_s) + timeout_s - time.monotonic()
            if remaining_s <= 0:
                which = f"rank{'s' * (len(waiting) > 1)} {', '.join(str(worker.rank) for worker in waiting)}"
                raise RankError(f"{which} of {num_ranks} did not finish or report within timeout_s (={timeout_s})")
            sources = [source for worker in waiting for source in (worker.pipe, worker.process.sentinel)]
            # Not for long: processes forked by a dead rank can keep both of its sources open.
            connection.wait(sources, min(remaining_s, 0.5))
            cause = receive_all(waiting, call, results, on_message)
            if cause is not None:
                raise RankError(f"rank {cause.rank} of {num_ranks} failed: {cause.summary}\n\n{cause.details}")
        return [results[rank] for rank in ranks]

    def _end(self, workers: Sequence[RankProcess]) -> None:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.end()
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

    Args:
        fn: A function that other processes can import by its name.
        *args: Its arguments, the same on every rank.
        num_ranks: Number of ranks.
        backend: As in `RankPool`.
        threads_per_rank: As in `RankPool`.
        prepare: As in `RankPool`.
        timeout_s: As in ``RankPool.run``.
        on_message: As in ``RankPool.run``.

    Returns:
        The results in rank order.

    Raises:
        RankError: If a rank raises, dies or does not finish in time.
        ValueError: As `RankPool` and its ``run``.
    """
    _check_ranks("num_ranks", num_ranks, backend)
    with RankPool(num_ranks, backend=backend, threads_per_rank=threads_per_rank, prepare=prepare) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, on_message=on_message)


def init_from_env(backend: str | None = None) -> torch.device:
    """Joins the process group that torchrun, or a cluster's launcher, describes in the environment.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and LOCAL_RANK (0 if unset) for the CUDA device.

    Args:
        backend: ``"gloo"`` or ``"nccl"``; None takes NCCL if there are CUDA devices.

    Returns:
        This rank's device.

    Raises:
        ValueError: If the environment describes no process group, the backend is unknown, or the device is missing.
    """
    import torch
    import torch.distributed as dist

    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be set in the environment: start this program with torchrun")
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    _check_ranks("LOCAL_RANK + 1", local_rank + 1, backend)
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return device


@functools.cache
def shared_pool() -> RankPool:
    """The pool of 8 ranks that the tests of a session share; closed when the interpreter exits."""
    return RankPool(8)


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} (={value!r}) must be a positive integer")


def _check_ranks(name: str, num_ranks: int, backend: str) -> None:
    _check_positive(name, num_ranks)
    if backend not in _BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: one of {', '.join(_BACKENDS)}")
    if backend == "nccl":
        import torch

        num_devices = torch.cuda.device_count()
        if num_ranks > num_devices:
            raise ValueError(
                f"{name} (={num_ranks}) must be at most the number of CUDA devices (={num_devices}) for NCCL"
            )


@atexit.register  # after multiprocessing's own hook, so run before it: that one waits for all processes
def _close_open_pools() -> None:
    for pool in list(_open_pools):
        pool.close()
