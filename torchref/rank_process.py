"""One rank as a process: the parent's handle on it, and what runs inside.

| direction       | bytes on the pipe                                                                  |
|-----------------|------------------------------------------------------------------------------------|
| parent -> rank  | a pickled ``Task``; later an empty message: all ranks are done, leave the group    |
| rank -> parent  | pickled ``(call, kind, content)``; kind: message (any number), result or failure   |

The call number keeps what a rank says late out of the next call; the start of the process answers as call 0.
Everything is pickled plainly, tensors by value: shared memory would be gone with a rank that ends first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

OnMessage = Callable[[int, Any], None]  # (rank, message)
Prepare = Callable[[int], None]  # (rank)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LONGEST_TIMEOUT_S = 1e7
_OTHER_FAILURES_S = 0.1
_WHILE_STARTING = (
    "It happened while the process started, which imports the main module again: a script must guard"
    ' what starts ranks with `if __name__ == "__main__":`.'
)
_send_message: Callable[[Any], None] | None = None  # set inside a rank, by each call for itself


class Task(NamedTuple):
    """What a rank is asked to run, and in which process group."""

    call: int
    rank: int
    num_ranks: int
    backend: str
    store_path: str
    timeout_s: float
    payload: bytes  # pickled (fn, args)


class Failure(NamedTuple):
    """Why a rank has no result."""

    rank: int
    at_s: float  # on the clock that all processes of the machine share
    summary: str
    details: str


class RankProcess:
    """The parent's handle on one rank.

    Attributes:
        rank: Its rank in every call.
        pipe: To and from it.
        process: It.
        heard_s: When it last reported or finished.
    """

    def __init__(self, rank: int, threads_per_rank: int, prepare: Prepare | None) -> None:
        """Starts the process; it answers call 0 when it is ready.

        Args:
            rank: Its rank in every call.
            threads_per_rank: Threads of torch's CPU operations.
            prepare: Called with the rank in the process, before anything is started there.
        """
        context = multiprocessing.get_context("spawn")
        # The kernel's "end with your parent" means the thread that started you: only the main one lives to the end.
        parent_pid = os.getpid() if threading.current_thread() is threading.main_thread() else None
        self.rank, self.heard_s = rank, 0.0
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(child_pipe, parent_pid, rank, threads_per_rank, prepare), name=f"rank-{rank}"
        )
        self.process.start()
        child_pipe.close()

    def send(self, task: Task | None) -> None:
        """Hands over a task, or None for its end; a process that is dead is found out by ``receive``."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(task) if task else b"")

    def receive(self, call: int) -> Iterator[tuple[str, Any]]:
        """Yields what the rank has sent for a call so far, as (kind, content), and last its death if it is dead."""
        died = not self.process.is_alive()  # asked first: what it sent before it died still counts
        try:
            while self.pipe.poll():
                its_call, kind, content = pickle.loads(self.pipe.recv_bytes())
                if its_call == call:
                    self.heard_s = time.monotonic()
                    yield kind, content
        except (EOFError, OSError):
            died = True
        if died:
            yield "failure", Failure(self.rank, 0.0, self._death(), "" if call else _WHILE_STARTING)

    def end(self) -> None:
        """Ends the process at once and waits until it is gone."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def _death(self) -> str:
        self.process.join(1.0)
        code = self.process.exitcode
        if code is None:
            return "closed its pipe"
        if code >= 0:
            return f"exited with code {code}"
        return f"killed by signal {-code} ({signal.Signals(-code).name})"


def receive_all(
    workers: Sequence[RankProcess], call: int, results: dict[int, Any], on_message: OnMessage | None
) -> Failure | None:
    """Takes in what ranks have sent for a call so far.

    Args:
        workers: Those without a result yet.
        call: Its number.
        results: Result by rank; new ones are added.
        on_message: Gets the messages.

    Returns:
        The failure that came first, if there is one.
    """
    failures = _receive(workers, call, results, on_message)
    if not failures:
        return None
    # One failure often makes others, and theirs may arrive first: the earliest is the cause.
    time.sleep(_OTHER_FAILURES_S)
    told = results.keys() | {failure.rank for failure in failures}
    failures += _receive([worker for worker in workers if worker.rank not in told], call, results, on_message)
    return min(failures, key=lambda failure: failure.at_s)


def _receive(
    workers: Sequence[RankProcess], call: int, results: dict[int, Any], on_message: OnMessage | None
) -> list[Failure]:
    failures = []
    for worker in workers:
        for kind, content in worker.receive(call):
            if kind == "result":
                results[worker.rank] = content
                break  # what befalls it afterwards is the next call's business
            if kind == "failure":
                failures.append(content)
                break
            if on_message is not None:
                on_message(worker.rank, content)
    return failures


def pickled(name: str, value: Any) -> bytes:
    """Pickles what a user gave; raises ValueError if it does not."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ValueError(f"{name} must pickle: {str(error).splitlines()[0]}") from error


def send_message(message: Any) -> None:
    """Sends a message to the parent of a rank; does nothing anywhere else."""
    if _send_message is not None:
        _send_message(message)


def _serve(pipe: Connection, parent_pid: int | None, rank: int, threads_per_rank: int, prepare: Prepare | None) -> None:
    """The life of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    if parent_pid is not None:
        _end_with_parent(parent_pid)
    if prepare is not None:
        try:
            prepare(rank)  # before a thread starts: what it sets for its thread, later ones inherit
        except BaseException as error:
            pipe.send_bytes(pickle.dumps((0, "failure", _describe(rank, error))))
            return
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_tasks, args=(pipe, tasks), daemon=True).start()
    if sys.platform == "linux":
        # Gloo would look up the host name, which laptops and containers often cannot resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    import torch
    import torch.distributed as dist

    one_at_a_time = threading.Lock()

    def send(call: int, kind: str, content: Any) -> None:
        message = pickle.dumps((call, kind, content))
        with one_at_a_time:
            pipe.send_bytes(message)

    send(0, "result", None)
    while True:
        received = tasks.get()
        if received:
            torch.set_num_threads(threads_per_rank)
            _run(pickle.loads(received), send)
        elif dist.is_initialized():
            dist.destroy_process_group()


def _read_tasks(pipe: Connection, tasks: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks.put(pipe.recv_bytes())
    os._exit(0)  # the parent is done with this process, or gone; the main thread may be waiting in a collective


def _end_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it was gone before the kernel knew
            os._exit(1)


def _run(task: Task, send: Callable[[int, str, Any], None]) -> None:
    global _send_message
    try:
        fn, args = pickle.loads(task.payload)
        _join_group(task)
        _send_message = functools.partial(send, task.call, "message")
        result = fn(*args)
        _flush()
        send(task.call, "result", result)
    except BaseException as error:
        _flush()
        send(task.call, "failure", _describe(task.rank, error))


def _join_group(task: Task) -> None:
    import torch
    import torch.distributed as dist

    device = None
    if task.backend == "nccl":
        device = torch.device("cuda", task.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        task.backend,
        init_method=f"file://{task.store_path}",
        rank=task.rank,
        world_size=task.num_ranks,
        # Longer than the parent's patience, which ends with a better message.
        timeout=timedelta(seconds=min(task.timeout_s + 60, _LONGEST_TIMEOUT_S)),
        device_id=device,
    )
    dist.barrier()  # no rank runs ahead, and perhaps out of the group, while others are still connecting to it


def _describe(rank: int, error: BaseException) -> Failure:
    at_s = time.monotonic()
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # without this file's own
    details = "".join(traceback.format_exception(type(error), error, frames))
    lines = str(error).splitlines()
    return Failure(rank, at_s, f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, details)


def _flush() -> None:
    # The process ends without the interpreter's own farewell, see _read_tasks.
    sys.stdout.flush()
    sys.stderr.flush()
