"""Scripts that start ranks: no rank outlives its parent, however the parent ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        # A zombie has ended, unless only its first thread has.
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, seconds=10.0):
    deadline_s = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(is_running(pid) for pid in pids)


def run_script(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, str(script)], env=env, **options)


def next_words(process, first):
    """The rest of the next line that begins with ``first``; some versions of Gloo print lines of their own."""
    for line in process.stdout:
        if line.split()[:1] == [first]:
            return line.split()[1:]
    return None


PARENT = """
import ctypes, os
import torch.distributed as dist
from torchref.launch import RankPool, report

def stay():
    report("busy:")
    if dist.get_rank() == 1:
        dist.barrier()  # for ever: rank 0 does not come
    ctypes.PyDLL(None).sleep(600)  # a C function that never lets Python run

def run(num_ranks, num_busy):
    pool = RankPool(num_ranks)
    print("pids:", *pool.run(os.getpid), flush=True)
    if num_busy > 0:
        pool.run(stay, num_ranks=num_busy, on_message=lambda rank, word: print(word, flush=True))

if __name__ == "__main__":
"""


ENDS = {
    "killed, one in C code, one in a collective and one idle": ("run(3, 2)", 3, 2, signal.SIGKILL),
    "interrupted": ("run(2, 1)", 2, 1, signal.SIGINT),
    "left open": ("run(1, 0)", 1, 0, None),  # the parent ends by itself
}


@pytest.mark.full
@pytest.mark.parametrize("end", ENDS)
def test_no_rank_outlives_its_parent(tmp_path, end):
    start, num_ranks, num_busy, how = ENDS[end]
    process = run_script(tmp_path, f"{PARENT}    {start}\n")
    pids: list[int] = []
    try:
        pids += map(int, next_words(process, "pids:"))
        assert len(pids) == num_ranks
        for _ in range(num_busy):
            assert next_words(process, "busy:") == []
        if how is not None:
            assert all(is_running(pid) for pid in pids)
        if how == signal.SIGKILL:
            process.kill()
        elif how == signal.SIGINT:
            os.killpg(process.pid, how)  # Ctrl-C on a terminal reaches all processes
        process.wait(timeout=30)
        assert wait_until_gone(pids)
        assert how == signal.SIGKILL or not list(tmp_path.glob("torchref-*"))
        # Only the parent prints it, not its ranks.
        assert process.stderr.read().count("KeyboardInterrupt") == (how == signal.SIGINT)
    finally:
        for pid in [process.pid, *pids]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
