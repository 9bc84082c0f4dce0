"""Which devices tests see: none of this machine's, unless they are marked ``gpu``, which run in one process.

And what is said of tests that leave something behind.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[1]
NAMES = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE")
TEST = f"""
import json, os, subprocess, sys
import pytest

def note():
    code = "import os; print(*[os.environ.get(name) or '-' for name in {NAMES}])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    with open("seen.jsonl", "a") as lines:
        lines.write(json.dumps([seen, os.getpid()]) + "\\n")

@pytest.mark.gpu
def test_gpu():
    note()

def test_cpu():
    note()
"""


def seen(folder, *options):
    for name in ("a_test.py", "b_test.py"):
        (folder / name).write_text(TEST)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "1,2", "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in environment.items() if name not in (NAMES[0], NAMES[2])}
    done = run(folder, environment, *options, "a_test.py", "b_test.py")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def run(folder, environment, *arguments):
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-p", "jaxddp.conftest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("options", "expected"), [(["-n", "0"], ["cpu", "-", "-"]), (["-m", "gpu"], ["-", "1,2", "false"])]
)
def test_tests_of_gpus_alone_see_them_and_run_in_one_process(tmp_path, options, expected):
    found = seen(tmp_path, *options)  # and the settings' -n 2
    assert [environment for environment, _ in found] == [expected] * 2
    assert len({process for _, process in found}) == 1


LEAVES = """
import os, socket, subprocess, sys, tempfile

def test_leaves():
    code = "import time; time.sleep(300)"
    starter = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", starter], start_new_session=True, **quiet)
    tempfile.mkdtemp(prefix="torchref-")
    globals()["kept"] = socket.create_server(("127.0.0.1", 0))
    with open("/dev/shm/" + os.environ["NAME_IN_SHM"], "w"):
        pass
    os.makedirs("runs/job-12345")
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_that_leaves_something_behind_fails(tmp_path, workers):
    (tmp_path / "leaves_test.py").write_text(LEAVES)
    in_shm = Path(f"/dev/shm/jaxddp-test-{os.getpid()}-{workers}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NAME_IN_SHM": in_shm.name}
    try:
        done = run(tmp_path, environment, "-n", workers, "leaves_test.py")
    finally:
        in_shm.unlink(missing_ok=True)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "left behind" in line]
    for left in ("listening port ", "time.sleep(300)", "temporary folder torchref-", str(in_shm), "runs/job-12345"):
        assert left in line
    assert "1 passed" in done.stdout


SAMPLED = """
import pytest

@pytest.mark.sample
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("name", "other"), [("a", 1), ("b", 2)])
def test_many(name, other, size):
    pass
"""


def test_of_a_sample_cases_with_every_value_run_by_default(tmp_path):
    (tmp_path / "many_test.py").write_text(SAMPLED)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for options, cases in (([], ["a-1-1", "a-1-2", "a-1-3", "b-2-1"]), (["-m", "full"], ["b-2-2", "b-2-3"])):
        done = run(tmp_path, environment, "-n", "0", "-vv", *options, "many_test.py")
        assert re.findall(r"test_many\[(\S+)\] PASSED", done.stdout) == cases, done.stdout
