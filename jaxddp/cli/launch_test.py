"""Processes started without torchrun: their place in the job, their logs, and the end of all when one fails."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.soak_guard import descendants
from jaxddp.cli import launch as command
from jaxddp.cli.launch import launch

SCRIPT = """
import signal, sys, time
from jaxddp.processes.job import find_job
job = find_job()
print("process", job.process_id, "of", job.num_processes, "at", job.host)
if sys.argv[1:] == ["fail"]:
    sys.exit(3) if job.process_id == 1 else time.sleep(60)
if sys.argv[1:2] == ["save"]:
    def save(number, frame):
        open(f"{sys.argv[2]}/saved-{job.process_id}", "w").close()
        time.sleep(job.process_id)
        sys.exit(128 + number)
    signal.signal(signal.SIGUSR1, save)
    open(f"{sys.argv[2]}/ready-{job.process_id}", "w").close()
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script, where torch cannot be found."""
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_every_process_has_its_place_and_its_log_and_process_0_is_shown(script, tmp_path, capfd):
    assert launch([script], 2, str(tmp_path / "logs")) == 0
    logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert logs == [f"process {rank} of 2 at 127.0.0.1\n" for rank in range(2)]
    assert capfd.readouterr().out == logs[0]


def test_a_process_that_fails_ends_the_others_and_gives_its_status(script, capfd):
    start = time.monotonic()
    assert launch([script, "fail"], 2) == 3
    assert time.monotonic() - start < 30  # the other would sleep for 60 s
    assert "rank 1 ended with status 3: ending the others" in capfd.readouterr().err


RESTARTED = """
import os, sys
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "of rank", os.environ["RANK"])
is_last = os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[1]
sys.exit(0 if is_last or os.environ["RANK"] == "0" else 3)
"""


@pytest.mark.parametrize("has_torch", [False, pytest.param(True, marks=pytest.mark.full)])
def test_all_are_started_again_as_often_as_asked(script, tmp_path, monkeypatch, capfd, has_torch):
    if has_torch:
        monkeypatch.setattr(command, "find_spec", find_spec)
    path = tmp_path / "restarted.py"
    path.write_text(RESTARTED)
    assert launch([str(path), "2"], 2, str(tmp_path / "logs"), max_restarts=2) == 0
    assert "attempt 2 of rank 0" in capfd.readouterr().out
    assert launch([str(path), "2"], 2, str(tmp_path / "logs"), max_restarts=1) == 3
    said = capfd.readouterr().err
    if has_torch:
        assert "Traceback" not in said and "exitcode: 3" in said
    else:
        log = (tmp_path / "logs" / "rank-1.log").read_text()
        assert log == "attempt 0 of rank 1\nattempt 1 of rank 1\n"
        assert "restart 1 of 1, after status 3" in said


ELASTIC = """
import glob, os, signal, sys, time
attempt, rank, num_ranks = (int(os.environ[f"{name}"]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
if rank == 0:
    print("attempt", attempt, "in", num_ranks, flush=True)
if sys.argv[1] == "all fail":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each fails by itself, also after the first was noticed
open(f"{sys.argv[2]}/{attempt}-{rank}", "w").close()
while len(glob.glob(f"{sys.argv[2]}/{attempt}-*")) < num_ranks:
    time.sleep(0.01)
if sys.argv[1] == "killed" and attempt < 2 and rank == 1 - attempt:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "all fail":
    sys.exit(2)
if attempt < 2:
    time.sleep(0.3)
    sys.exit(5)  # as watchdogs do
"""


@pytest.mark.parametrize(
    ("how", "fits", "attempts", "status"),
    [
        ("killed", lambda num: True, [5, 4, 3], 0),
        ("killed", lambda num: num % 2, [5, 3, 1], 0),
        ("all fail", lambda num: True, [5], 2),
        ("killed", lambda num: num == 5, [5], 9),
    ],
)
def test_processes_that_are_lost_are_left_out(tmp_path, capfd, how, fits, attempts, status):
    path = tmp_path / "elastic.py"
    path.write_text(ELASTIC)
    assert launch([str(path), how, str(tmp_path)], 5, str(tmp_path / "logs"), max_restarts=2, fits=fits) == status
    lines = [f"attempt {attempt} in {num}" for attempt, num in enumerate(attempts)]
    assert capfd.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("has_torch", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_signal_reaches_every_process_and_the_status_is_its_own(script, tmp_path, monkeypatch, has_torch):
    if has_torch:
        monkeypatch.setattr(command, "find_spec", find_spec)

    def send():
        deadline = time.monotonic() + 50
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    start = time.monotonic()
    assert launch([script, "save", str(tmp_path)], 2, max_restarts=1) == 128 + signal.SIGUSR1
    thread.join()
    assert time.monotonic() - start < 55  # they would sleep for 60 s, and those that are started again as well
    assert len(list(tmp_path.glob("saved-*"))) == 2


INTERRUPTED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
open(f"{sys.argv[1]}/ready-{os.environ['RANK']}", "w").close()
time.sleep(60)
"""


@pytest.mark.full
def test_ctrl_c_ends_torchruns_agent_without_a_traceback(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(INTERRUPTED)
    arguments = [sys.executable, "-m", "jaxddp", "launch", "--ranks=2", f"--log-dir={tmp_path}", path, tmp_path]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 50
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=50)
    assert process.returncode == 130
    assert "interrupted" in said and "Traceback" not in said


def listening_addresses(pids):
    """Where processes listen, as the kernel writes it; 0100007F is 127.0.0.1."""
    sockets = set()
    for path in (path for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(path))
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


JOINED = INTERRUPTED.replace(
    "import os", "from torchref.launch import init_from_env\ninit_from_env('gloo')\nimport os", 1
)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
@pytest.mark.parametrize("restarts", [0, 1])
def test_nothing_listens_to_other_hosts(tmp_path, restarts):
    """Neither the ranks nor torchrun's agent, whose stores would: before and after a restart."""
    path = tmp_path / "script.py"
    path.write_text(JOINED)
    arguments = [sys.executable, "-m", "jaxddp", "launch", "--ranks=2", f"--log-dir={tmp_path}", "--max-restarts=1"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([*arguments, path, tmp_path], stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            for restart in range(restarts + 1):
                deadline = time.monotonic() + 60
                while len(list(tmp_path.glob("ready-*"))) < 2:
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.05)
                pids = {process.pid, *descendants(process.pid)}
                assert len(pids) >= 4 and listening_addresses(pids) == {"0100007F"}
                for ready in tmp_path.glob("ready-*") if restart < restarts else ():
                    ready.unlink()
                    rank = [pid for pid in pids if f"RANK={ready.name[-1]}".encode() in variables_of(pid)][0]
                if restart < restarts:
                    os.kill(rank, signal.SIGKILL)
        finally:
            process.terminate()


def variables_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def in_job(monkeypatch):
    """Makes this process number 1 of two."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("options", [[], ["--ranks=2", "--log-dir=logs"]])
def test_in_a_job_the_script_runs_as_this_process(script, tmp_path, options):
    command = [
        sys.executable,
        "-m",
        "jaxddp",
        "launch",
        *options,
        script,
        "sleep",
        "--ranks=3",
    ]  # the last is the script's
    Path(script).write_text(f"{SCRIPT}\nimport os; print(sys.argv[1:], os.getpid()); sys.exit(3)")
    with subprocess.Popen(command, env=os.environ | JOB, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=50)
    assert process.returncode == 3
    assert said.splitlines() == ["process 1 of 2 at 127.0.0.1", f"['sleep', '--ranks=3'] {process.pid}"]
    assert not (tmp_path / "logs").exists() and not (tmp_path / "runs").exists()


def test_process_0_of_a_job_says_that_logs_are_the_launchers(script, in_job, monkeypatch, capsys):
    from jaxddp.__main__ import main

    def replace(path, arguments):
        raise OSError("this process goes on")

    monkeypatch.setattr(os, "execv", replace)
    said = []
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        assert main(["launch", "--log-dir=logs", script]) == 2
        said.append(capsys.readouterr().err)
    line = "log_dir (='logs') is not used in a job: torchrun shows what its processes print\n"
    assert said == ["error: this process goes on\n", f"{line}error: this process goes on\n"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--ranks=3"], "ranks (=3) must be the job's processes (=2)"),
        (["--ranks=0"], "ranks (=0) must be the job's processes (=2)"),
        (["--max-restarts=1"], "max_restarts (=1) must not be given in a job: its launcher restarts it, as torchrun"),
        (["--elastic"], "elastic (=True) must not be given in a job: its launcher restarts it, as torchrun"),
    ],
)
def test_another_job_than_the_one_that_it_is_in_is_refused(script, in_job, capsys, options, line):
    from jaxddp.__main__ import main

    assert main(["launch", *options, script]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}") and said.count("\n") == 1


def test_a_job_of_one_process_can_start_one_of_several(script, tmp_path, monkeypatch, capfd):
    from jaxddp.__main__ import main

    for name, value in (JOB | {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--ranks=2", f"--log-dir={tmp_path / 'logs'}", script]) == 0
    assert capfd.readouterr().out == "process 0 of 2 at 127.0.0.1\n"


def test_a_failure_names_the_folder_of_the_logs(script, tmp_path, capfd):
    from jaxddp.__main__ import main

    logs = tmp_path / "logs"
    assert main(["launch", "--ranks=2", f"--log-dir={logs}", script, "fail"]) == 3
    assert capfd.readouterr().err.endswith(f"ended with status 3: the logs of all ranks are in {logs}\n")


def test_bad_input(script, tmp_path, capsys):
    from jaxddp.__main__ import main

    assert main(["launch", script]) == 2
    assert (
        capsys.readouterr().err
        == "error: ranks (=None) must be given outside of a job: the number of processes to start\n"
    )
    assert main(["launch", "--ranks", "2", str(tmp_path / "none.py")]) == 2
    assert capsys.readouterr().err.startswith("error: script (=")
    with pytest.raises(ValueError, match=r"^num_processes \(=0\) must be a positive integer$"):
        launch(["script.py"], 0)
