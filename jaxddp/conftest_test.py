"""Which devices tests see: none of this machine's, unless they are marked ``gpu``, which run in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-p", "jaxddp.conftest", "-p", "no:cacheprovider", "-q", *options, "a_test.py", "b_test.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def test_tests_see_no_gpus(tmp_path):
    assert [environment for environment, _ in seen(tmp_path, "-n", "0")] == [["cpu", "-", "-"]] * 2


def test_tests_of_gpus_see_them_and_run_in_one_process(tmp_path):
    found = seen(tmp_path, "-m", "gpu")  # and the settings' -n 2
    assert [environment for environment, _ in found] == [["-", "1,2", "false"]] * 2
    assert len({process for _, process in found}) == 1
