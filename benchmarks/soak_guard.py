"""Ends everything that a soak started, however the soak ends: a process that waits for the end of its parent's pipe.

Ctrl-C, an exception and a kill of the soak close the pipe alike. Then all marked processes are killed, stopped ones as
well, the disk is unmounted and the temporary folder removed. It imports no framework: it has to start at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "JAXDDP_SOAK"  # in the environment of every process that a soak starts
_LONGEST_S = 30.0


def marked_processes(mark: str) -> set[int]:
    """The processes that a soak started, whoever their parents are, but those that have ended."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            is_ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not is_ended and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that they did."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found |= {child, *descendants(child)}
    return found


def main(mark: str, folder: str) -> None:
    """Waits for the end of the parent, and cleans up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    deadline = time.monotonic() + _LONGEST_S
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    disk = Path(folder, "disk")
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", disk], check=False)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
