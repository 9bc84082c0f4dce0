"""``python -m jaxddp launch``: starts a script as the processes of a job on this machine, with torchrun's variables."""

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..arguments import check_integer, check_positive
from ..processes.job import STUCK_S, TOKEN, find_job, print_line
from ..processes.watchdog import STATUS as LOST_ANOTHER
from .parser import noted_signals

Process = subprocess.Popen[bytes]

_POLL_S = 0.1
_LAST_WORDS_S = 3.0  # after a failure, in which the others may say what they lost
_GRACE_S = 30.0  # between SIGTERM and SIGKILL, as torchrun's
# Linux kills the process when this one dies. Not preexec_fn: Python code between fork and exec can deadlock in a
# process with threads, as JAX's is.
_START = """
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the launcher has ended")
os.execv(sys.executable, [sys.executable, "-u", *sys.argv[2:]])
"""


def child_command(command: Sequence[str]) -> list[str]:
    """The command line of a Python process that dies with this one, however it ends; on Linux."""
    return [sys.executable, "-c", _START, str(os.getpid()), *command]


def add_parser(commands: Any) -> None:
    """Adds the command ``launch`` to argparse's subparsers."""
    parser = commands.add_parser(
        "launch",
        help="start a script as several processes of one job",
        description="Start a script as the processes of a job on this machine. The script calls jaxddp.start_process() "
        "or torchref.launch.init_from_env(). Rank 0 is shown, every other rank has a log. torchrun, srun and mpirun "
        "start the script itself.",
    )
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", required=True, help="processes to start")
    add("--log-dir", metavar="DIR", default="runs/launch", help="folder for the ranks' logs (default: %(default)s)")
    add("--stuck-s", type=float, metavar="S", help="seconds in which a rank may be silent, or keep the others "
        "waiting, before all end with status 5 (default: what the script says, or 600)")  # fmt: skip
    add("--max-restarts", type=int, default=0, metavar="K", help="start all processes again when one fails, at most K "
        "times; for programs that go on from their checkpoints (default: %(default)s)")  # fmt: skip
    add("script", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Starts the processes and waits for them."""
    if (job := find_job()) is not None and job.num_processes > 1:
        raise ValueError(f"{job.launcher} has started {job.num_processes} processes: let it start the script itself")
    if arguments.stuck_s is not None:
        check_positive("stuck_s", arguments.stuck_s)
        os.environ[STUCK_S] = str(arguments.stuck_s)
    command = [arguments.script, *arguments.arguments]
    if status := launch(command, arguments.ranks, arguments.log_dir, arguments.max_restarts):
        print_line(f"ended with status {status}: the logs of the other ranks are in {arguments.log_dir}")
    return status


def launch(command: Sequence[str], num_processes: int, log_dir: str | None = None, max_restarts: int = 0) -> int:
    """Runs ``python command`` as the processes of a job; returns 0, or the exit status of one that failed.

    With ``log_dir`` process 0 alone is shown. All are started again after one has failed, but not after a signal.
    """
    check_integer("ranks", num_processes)
    check_integer("max_restarts", max_restarts, 0)
    for restart in range(max_restarts + 1):
        with noted_signals(is_in_job=False) as signals:
            status = _wait(_start(command, num_processes, log_dir, restart), signals)
        if status == 0 or signals or restart == max_restarts:
            break
        print_line(f"restart {restart + 1} of {max_restarts}, after status {status}")
    return status


def _start(command: Sequence[str], count: int, log_dir: str | None, restart: int) -> list[Process]:
    """Starts the processes of a job; each leads a group of its own, with whatever it starts."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    alike = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": restart,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # not of a torchrun around this
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // count)),
        TOKEN: secrets.token_hex(16),
    }
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(count):
        variables = {name: str(value) for name, value in {**alike, "RANK": rank, "LOCAL_RANK": rank}.items()}
        is_shown = rank == 0 or log_dir is None
        # Appended: another job may still write there.
        with contextlib.nullcontext() if is_shown else Path(str(log_dir), f"rank-{rank}.log").open("ab") as log:
            process = subprocess.Popen(
                child_command(command),
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        processes.append(process)
    return processes


def _wait(processes: Sequence[Process], signals: Sequence[int]) -> int:
    """Waits for all, passes signals on, and ends the others after a failure; the exit status."""
    until, num_passed_on = float("inf"), 0
    try:
        while _running(processes) and time.monotonic() < until and signal.SIGTERM not in signals:
            for number in signals[num_passed_on:]:
                _send(processes, number)
                num_passed_on += 1
            if not signals and _failure(processes)[1]:
                until = min(until, time.monotonic() + _LAST_WORDS_S)
            time.sleep(_POLL_S)
        rank, status = _failure(processes)
        if status and not signals and len(processes) > 1:
            print_line(f"rank {rank} ended with status {status}: ending the others")
    finally:
        _end(processes)
    return status or _failure(processes)[1]


def _failure(processes: Sequence[Process]) -> tuple[int, int]:
    """Rank and status of one that has failed, by itself rather than for the loss of another; status 0 if none has."""
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if not failed:
        return 0, 0
    rank = min(failed, key=lambda rank: processes[rank].returncode == LOST_ANOTHER)
    status = processes[rank].returncode
    return rank, status if status >= 0 else 128 - status  # as shells have it: 137 after SIGKILL


def _running(processes: Sequence[Process]) -> list[Process]:
    """Those that have not ended; of others, what they have started is killed."""
    for process in processes:
        if process.returncode is None and process.poll() is not None:
            _kill_group(process)
    return [process for process in processes if process.returncode is None]


def _end(processes: Sequence[Process]) -> None:
    """Ends what still runs, by SIGTERM and, if it ignores that, by SIGKILL."""
    _send(processes, signal.SIGTERM)
    _send(processes, signal.SIGCONT)  # one that is stopped ends as well
    deadline = time.monotonic() + _GRACE_S
    while _running(processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in _running(processes):
        _kill_group(process)
        process.wait()


def _send(processes: Sequence[Process], number: int) -> None:
    for process in processes:
        if process.returncode is None:  # send_signal would reap one that has just ended, and what it started be missed
            os.kill(process.pid, number)


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
