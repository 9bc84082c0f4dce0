"""One job at a time writes to a folder of checkpoints: it locks ``DIR/.writer``. Both packages use it; no framework."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

_files: dict[Path, Any] = {}  # the locked file of each folder that this process writes to


def lock_folder(directory: Path) -> bool:
    """Locks a folder for this process, and creates it if needed; the system drops the lock of a process that ends.

    Nothing is noticed on a file system without locks.

    Returns:
        Whether this process did not hold the lock before.

    Raises:
        ValueError: If another process has locked it.
        OSError: If it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    is_new = directory not in _files
    while directory not in _files:
        file = open(directory / ".writer", "a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().decode(errors="replace") or "another process"
            raise ValueError(
                f"directory (={str(directory)!r}) is being written to by {holder}: let that finish, or save into "
                "another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):  # else its holder has just removed it
                file.truncate(0)
                try:
                    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
                except OSError:  # the disk is full
                    file.close()
                    raise
                _files[directory] = file
    return is_new


def unlock_folder(directory: Path) -> None:
    """Drops the lock of a folder, if this process holds it."""
    file = _files.pop(directory, None)
    if file is not None:
        Path(file.name).unlink(missing_ok=True)
        file.close()
