"""``python -m jaxddp launch``: starts a script as the processes of a job on this machine.

The processes are torchrun's where torch is installed. Elsewhere, and with ``--elastic``, they are started here with
torchrun's variables (``jaxddp.processes.job``): torchrun's agent would replace a rank that is lost on its own host.
When one fails, the others are ended, and the exit status is its own.

In a job of several processes, which srun, torchrun or mpirun has started, it starts none: each process becomes the
script.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ..processes.job import Job, find_job
from ..processes.stderr import print_line
from ..processes.watchdog import STATUS as LOST_ANOTHER
from .interrupts import noted_signals

_LOG_DIR = "runs/launch"
_POLL_S = 0.1
_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_NOT_LOST = (0, LOST_ANOTHER, -signal.SIGTERM, 128 + signal.SIGTERM)  # the last two of those that are ended here
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_START = f"""
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the launcher has ended")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
# Its own main would print tracebacks of failures and signals, and end with status 1 whatever a rank's is. Its stores
# would listen to other hosts.
_TORCHRUN = f"""
import socket, sys
import torch.distributed
class StoreOnLoopback(torch.distributed.TCPStore):
    def __init__(self, host_name, port=0, *arguments, is_master=False, **options):
        if is_master:
            listener = socket.create_server(("127.0.0.1", port), backlog=4096)
            port, options["master_listen_fd"] = listener.getsockname()[1], listener.detach()
        super().__init__(host_name, port, *arguments, is_master=is_master, **options)
torch.distributed.TCPStore = StoreOnLoopback
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run
try:
    run(parse_args(sys.argv[1:]))
except ChildFailedError as error:
    codes = [failure.exitcode for failure in error.failures.values()]
    sys.exit(abs(min(codes, key=lambda code: code == {LOST_ANOTHER})))
except SignalException as error:
    sys.exit(128 + error.sigval)
"""


def add_parser(commands: Any) -> None:
    """Adds the command ``launch`` to argparse's subparsers."""
    parser = commands.add_parser(
        "launch",
        help="start a script as several processes of one job",
        description="Start a script as the processes of a job on this machine. The script calls jaxddp.start_process() "
        "or torchref.init_from_env(). Rank 0 is shown, every rank has a log. In a job that torchrun, srun or mpirun "
        "has started, each process runs the script.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes to start; not needed in a job, which has them"
    )
    parser.add_argument(
        "--log-dir", metavar="DIR", help=f"folder for the ranks' logs, not used in a job (default: {_LOG_DIR})"
    )
    add_max_restarts(parser)
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Starts the processes and waits for them; in a job of several processes, becomes the script.

    Raises:
        ValueError: If there is no such script, or the number of ranks is not positive, not given, or not the job's.
    """
    if not Path(arguments.script).is_file():
        raise ValueError(f"script (={arguments.script!r}) must be a file")
    command = [arguments.script, *arguments.arguments]
    job = find_job()
    if job is not None and (job.num_processes > 1 or arguments.ranks is None):
        _run_in_job(job, command, arguments)
    check_elastic(arguments)
    if arguments.ranks is None:
        raise ValueError("ranks (=None) must be given outside of a job: the number of processes to start")
    fits = (lambda num_ranks: True) if arguments.elastic else None
    log_dir = _LOG_DIR if arguments.log_dir is None else arguments.log_dir
    status = launch(command, arguments.ranks, log_dir, arguments.max_restarts, fits)
    if status:
        print_line(f"ended with status {status}: the logs of all ranks are in {log_dir}")
    return status


def _run_in_job(job: Job, command: Sequence[str], arguments: argparse.Namespace) -> NoReturn:
    """Replaces this process, which a launcher has started, by the script."""
    if arguments.ranks not in (None, job.num_processes):
        raise ValueError(f"ranks (={arguments.ranks}) must be the job's processes (={job.num_processes})")
    for name in ("max_restarts", "elastic"):
        if value := getattr(arguments, name):
            raise ValueError(
                f"{name} (={value}) must not be given in a job: its launcher restarts it, as torchrun does with "
                "--max-restarts and SLURM with --requeue"
            )
    if arguments.log_dir is not None and job.process_id == 0:
        print_line(
            f"log_dir (={arguments.log_dir!r}) is not used in a job: {job.launcher} shows what its processes print"
        )
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])


def add_max_restarts(parser: argparse.ArgumentParser) -> None:
    """Adds the options ``--max-restarts`` and ``--elastic``."""
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="K", help="start all processes again when one fails, at most K "
        "times; for programs that go on from their checkpoints (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--elastic", action="store_true", help="with --max-restarts: start again without the processes that were lost"
    )


def check_elastic(arguments: argparse.Namespace) -> None:
    """Refuses ``--elastic`` without ``--max-restarts``, where nothing is started again, by a ValueError."""
    if arguments.elastic and not arguments.max_restarts:
        raise ValueError("elastic (=True) must come with max_restarts")


def launch(
    command: Sequence[str],
    num_processes: int,
    log_dir: str | None = None,
    max_restarts: int = 0,
    fits: Callable[[int], bool] | None = None,
) -> int:
    """Runs ``python command`` as the processes of a job; returns 0, or the exit status of one that failed.

    Args:
        command: A script or ``-m module``, and its arguments.
        num_processes: How many.
        log_dir: Folder for a log of each process, of which process 0 alone is shown; if None all are shown.
        max_restarts: How often all processes are started again after one has failed, but not after a signal.
        fits: Whether the program runs in a number of processes: then those that were lost are not started again, nor as
            many others as it takes. If None as many are started as before.

    Raises:
        ValueError: If ``num_processes`` is not positive, or ``max_restarts`` negative.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes (={num_processes}) must be a positive integer")
    if max_restarts < 0:
        raise ValueError(f"max_restarts (={max_restarts}) must not be negative")
    if find_spec("torch") is None or fits is not None:  # torchrun's agent would replace what was lost
        for restart in range(max_restarts):
            status, signals, num_lost = _launch_alone(command, num_processes, log_dir, restart)
            if status == 0 or signals:
                return status
            if fits is not None:
                left = num_processes - num_lost
                num_processes = next(filter(fits, range(left, 0, -1)), 0)
                if num_processes == 0:
                    print_line(f"no restart: {left} processes are left")
                    return status
            print_line(f"restart {restart + 1} of {max_restarts}, after status {status}, in {num_processes} processes")
        return _launch_alone(command, num_processes, log_dir, max_restarts)[0]
    # Without a folder torchrun would make one under /tmp, and leave it there.
    logs = [f"--log-dir={os.devnull}"] if log_dir is None else [f"--log-dir={log_dir}", "--redirects=3", "--tee=0:3"]
    torchrun = ["-c", _TORCHRUN, f"--nproc-per-node={num_processes}", f"--max-restarts={max_restarts}"]
    here = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    # torchrun would set it to 1 and say so in five lines.
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes)), **os.environ}
    process = subprocess.Popen(_ended_with_parent([*torchrun, *here, *logs, *command]), env=environment)
    return _wait([process])[0]


def _launch_alone(
    command: Sequence[str], num_processes: int, log_dir: str | None, restart: int
) -> tuple[int, list[int], int]:
    """Runs the processes once; gives the exit status, the signals that were passed on, and how many were lost."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    for rank in range(num_processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment["TORCHELASTIC_RESTART_COUNT"] = str(restart)
        process = subprocess.Popen(
            _ended_with_parent(["-u", *command]),
            env=environment,
            stdout=None if log_dir is None else subprocess.PIPE,
            stderr=None if log_dir is None else subprocess.STDOUT,
        )
        processes.append(process)
        if log_dir is not None:
            log = Path(log_dir, f"rank-{rank}.log")
            readers.append(
                threading.Thread(target=_write_log, args=(process, log, rank == 0, restart > 0), daemon=True)
            )
            readers[-1].start()
    ended = _wait(processes)
    for reader in readers:
        reader.join(_GRACE_S)
    lost = [process.returncode for process in processes if process.returncode not in _NOT_LOST]
    # XLA aborts processes that miss process 0.
    return *ended, sum(status != -signal.SIGABRT for status in lost) or len(lost)


def _write_log(process: subprocess.Popen, path: Path, is_shown: bool, appends: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert process.stdout is not None
    with path.open("ab" if appends else "wb", buffering=0) as log, process.stdout as lines:
        for line in lines:
            log.write(line)
            if is_shown:
                os.write(1, line)


def _wait(processes: list[subprocess.Popen]) -> tuple[int, list[int]]:
    """Waits for all processes; after the first failure, and however this ends, ends the others.

    Signals of schedulers are passed on to the ranks, which end by themselves.

    Returns:
        The exit status, and the signals.
    """
    with noted_signals(is_in_job=False) as signals:
        failed, num_passed_on = None, 0
        signalled: set[int] = set()
        try:
            while None in [process.poll() for process in processes]:
                if signalled or len(signals) > num_passed_on:
                    ranks = {rank for process in processes for rank in _ranks_of(process)}
                    if signalled and not signalled & ranks:  # torchrun's agent takes that for a failure
                        for process in processes:
                            _kill(process)
                        return 128 + signals[0], signals
                for number in signals[num_passed_on:]:
                    for pid in ranks:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)
                    num_passed_on, signalled = num_passed_on + 1, ranks
                # First one that fails by itself, not for the loss of another.
                all_failed = sorted((p for p in processes if p.returncode), key=lambda p: p.returncode == LOST_ANOTHER)
                if failed := next(iter(all_failed), None):
                    rank = processes.index(failed)
                    if len(processes) > 1 and not signals:
                        print_line(f"rank {rank} ended with status {failed.returncode}: ending the others")
                    break
                time.sleep(_POLL_S)
        finally:
            _end(processes)
    status = max(abs(process.returncode) for process in processes if failed is None or process is failed)
    is_theirs = bool(signals) and status in (1, signals[0], 128 + signals[0])  # 1 is torchrun's own
    return 128 + signals[0] if is_theirs else status, signals


def _ranks_of(process: subprocess.Popen) -> list[int]:
    """The ranks that a process started, if it is torchrun's agent, which would kill them 30 s after a signal."""
    if not isinstance(process.args, list) or _TORCHRUN not in process.args:
        return [process.pid]
    with contextlib.suppress(OSError):
        lists = [path.read_text().split() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
        if ranks := [int(pid) for pids in lists for pid in pids]:
            return ranks
    return [process.pid]


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(process)


def _kill(process: subprocess.Popen) -> None:
    """Kills a process, and the ranks of torchrun's agent, which would outlive it."""
    process.send_signal(signal.SIGSTOP)  # so that it starts no others
    for pid in {*_ranks_of(process), process.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _ended_with_parent(arguments: Sequence[str]) -> list[str]:
    """A command for ``python arguments`` that Linux ends with SIGTERM when this process dies."""
    # Not preexec_fn: Python code between fork and exec can deadlock in a process with threads, as JAX's is.
    return [sys.executable, "-c", _START, str(os.getpid()), *arguments]
