"""Ends everything that a soak started, however the soak ends: a process that waits for the end of its parent's pipe.

Ctrl-C, an exception and a kill of the soak close the pipe alike. Then all marked processes are killed, stopped ones as
well, the disk is unmounted and the temporary folder removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .usage import marked_processes

DISK_BYTES = 64 * 2**20
_LONGEST_S = 30.0


class Workplace(NamedTuple):
    """A temporary folder where a soak works, and the mark in the environment of its processes.

    ``has_disk`` tells whether ``folder / "disk"`` is a file system of its own, which can be filled.
    """

    mark: str
    folder: Path
    has_disk: bool


@contextlib.contextmanager
def guarded() -> Iterator[Workplace]:
    """A temporary folder with a small disk, where mounting one is allowed, and the end of all marked processes."""
    mark, folder = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="jaxddp-soak-"))
    disk = folder / "disk"
    disk.mkdir()
    # In a session of its own: it outlives Ctrl-C.
    with subprocess.Popen(
        [sys.executable, "-m", __name__, mark, str(folder)], stdin=subprocess.PIPE, start_new_session=True
    ) as guard:
        assert guard.stdin is not None
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "jaxddp-soak", str(disk)]
        has_disk = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield Workplace(mark, folder, has_disk)
        finally:
            guard.stdin.close()
            guard.wait(2 * _LONGEST_S)


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
