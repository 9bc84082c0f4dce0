"""Processes of a job on this machine: their places and logs, and the end of all, with what they have started."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxddp.__main__ import main
from jaxddp.cli.conftest import assert_refused
from jaxddp.cli.launch import launch
from jaxddp.conftest import is_alive, wait_for

SCRIPT = """
import os, signal, subprocess, sys, time
how, folder, attempt = sys.argv[1], sys.argv[2], os.environ["TORCHELASTIC_RESTART_COUNT"]
end = time.monotonic() + 30
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # nobody listens at the job's port
def wait_for_all():
    open(f"{folder}/{attempt}-{rank}", "w").close()
    while len([name for name in os.listdir(folder) if name.startswith(f"{attempt}-")]) < num_ranks:
        time.sleep(0.01)
def leave(number, frame):
    open(f"{folder}/saved-{rank}", "w").close()
    sys.exit(128 + number)
print("attempt", attempt, "rank", rank, "of", num_ranks, flush=True)
if how == "fail" and rank == 1:
    sys.exit(3)
if how == "lost":
    wait_for_all()
    sys.exit((5, 1)[rank])
if how == "until 2" and attempt != "2":
    sys.exit(3 * (rank == 1))
if how in ("fork", "child") and rank == 1:
    if how == "child" or os.fork() == 0:
        child = subprocess.Popen(["sleep", "60"])
        open(f"{folder}/child", "w").write(str(child.pid))
        how == "fork" and time.sleep(60)
    while not (os.path.exists(f"{folder}/child") and os.path.getsize(f"{folder}/child")) and time.monotonic() < end:
        time.sleep(0.01)
if how == "stopped" and rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
if how == "stopped":
    sys.exit(5)
if how == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "parent":
    subprocess.Popen(["sleep", "60"])
    how = "signal"
if how == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    how = "signal"
if how == "signal":
    signal.signal(signal.SIGUSR1, leave)
if how in ("fail", "killed", "signal"):
    wait_for_all() if how == "signal" else None
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts ranks that behave in some way, and gives the exit status; the script and its folder."""
    monkeypatch.setattr("jaxddp.cli.launch._LAST_WORDS_S", 1.0)
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(how, num_ranks=2, log_dir=None, **options):
        return launch([str(tmp_path / "script.py"), how, str(tmp_path)], num_ranks, log_dir, **options)

    return run


def test_every_process_has_its_place_and_its_log_but_process_0_which_is_shown(start, tmp_path, capfd):
    assert start("print", log_dir=str(tmp_path / "logs")) == 0
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "attempt 0 rank 1 of 2\n"
    assert capfd.readouterr().out == "attempt 0 rank 0 of 2\n"


@pytest.mark.parametrize("how", ["fork", "child"])
def test_what_a_rank_has_started_neither_holds_the_launcher_nor_outlives_it(start, tmp_path, how):
    since = time.monotonic()
    assert start(how, log_dir=str(tmp_path / "logs")) == 0
    assert time.monotonic() - since < 30  # it sleeps for 60 s
    wait_for(lambda: not is_alive((tmp_path / "child").read_text()), 10)


@pytest.mark.parametrize(("how", "status"), [("stopped", 5), ("killed", 128 + signal.SIGKILL), ("lost", 1)])
def test_a_rank_that_is_lost_ends_all_at_once_with_a_status_as_a_shell_gives_it(start, how, status):
    since = time.monotonic()
    assert start(how) == status
    assert time.monotonic() - since < 9  # less than between SIGTERM and SIGKILL


def test_all_are_started_again_as_often_as_asked(start, tmp_path):
    logs = tmp_path / "logs"
    assert start("until 2", log_dir=str(logs), max_restarts=2) == 0
    assert (logs / "rank-1.log").read_text() == "".join(f"attempt {attempt} rank 1 of 2\n" for attempt in range(3))
    assert start("until 2", log_dir=str(logs), max_restarts=1) == 3
    again = [f"attempt {attempt} rank 1 of 2" for attempt in (0, 1, 2, 0, 1)]
    assert (logs / "rank-1.log").read_text().splitlines() == again


@pytest.mark.parametrize(
    ("how", "number", "status", "num_saved"),
    [("signal", signal.SIGUSR1, 128 + signal.SIGUSR1, 2), ("ignore", signal.SIGTERM, 128 + signal.SIGKILL, 0)],
)
def test_a_signal_reaches_every_process_and_kills_it_if_it_ignores_its_end(
    start, tmp_path, monkeypatch, how, number, status, num_saved
):
    def send():
        wait_for(lambda: len(list(tmp_path.glob("0-*"))) == 2)
        os.kill(os.getpid(), number)

    monkeypatch.setattr("jaxddp.cli.launch._GRACE_S", 0.5)
    thread = threading.Thread(target=send)
    thread.start()
    assert start(how, max_restarts=1) == status
    thread.join()
    assert len(list(tmp_path.glob("saved-*"))) == num_saved


def children_of(pid):
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


INTERRUPTED, KILLED = (signal.SIGINT, 130, "interrupted\n"), (signal.SIGKILL, -9, "")


@pytest.mark.parametrize(
    ("how", "number", "status", "line"),
    [
        ("signal", *INTERRUPTED),
        ("ignore", *INTERRUPTED),
        ("parent", *INTERRUPTED),
        ("signal", *KILLED),
        ("ignore", *KILLED),
    ],
)
def test_the_ranks_end_with_the_launcher(start, tmp_path, how, number, status, line):
    quick = "import sys; from jaxddp import __main__ as jaxddp; jaxddp.launch._GRACE_S = 0.5; sys.exit(jaxddp.main())"
    command = [sys.executable, "-c", quick, "launch", "--ranks=2", tmp_path / "script.py", how, tmp_path]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(list(tmp_path.glob("0-*"))) == 2)
        ranks = children_of(process.pid)
        started = [child for rank in ranks for child in children_of(rank)]
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=50)
    assert process.returncode == status and len(ranks) == 2 and said.endswith(line)
    assert len(started) == 2 * (how == "parent")
    wait_for(lambda: not any(map(is_alive, ranks + started)), 10)


JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_job_of_one_process_can_start_one_of_several_whose_failure_ends_all(start, tmp_path, monkeypatch, capfd):
    of_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (JOB | of_torchrun).items():
        monkeypatch.setenv(name, value)
    logs, since = tmp_path / "logs", time.monotonic()
    assert main(["launch", "--ranks=2", f"--log-dir={logs}", str(tmp_path / "script.py"), "fail", str(tmp_path)]) == 3
    said = capfd.readouterr()
    assert said.out == "attempt 0 rank 0 of 2\n" and str(logs) in said.err and "rank 1 ended with status 3" in said.err
    assert time.monotonic() - since < 30  # the other would sleep for 60 s


def test_bad_input(monkeypatch, capsys):
    for options, line in {
        "": "the following arguments are required: --ranks",
        "--ranks=0": "ranks (=0) must be a positive integer",
        "--ranks=2 --stuck-s=0": "stuck_s (=0.0) must be a positive finite number",
    }.items():
        assert_refused(f"launch {options} script.py", line, capsys)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    line = "torchrun has started 2 processes: let it start the script itself"
    assert_refused("launch --ranks=2 script.py", line, capsys)
