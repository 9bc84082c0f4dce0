"""A folder of checkpoints: each is complete or not there, the newest are kept, damaged ones are passed over.

``DIR/120`` holds step 120: ``state...``, arrays in the format of the framework, and ``about.json``, with size and
CRC-32 of each file. A save writes ``DIR/120.partial`` and renames it. Process 0 writes and reads, and locks
``DIR/.writer``; what it raises, all raise. Both packages use this file; no framework is imported.
"""

import abc
import contextlib
import fcntl
import io
import itertools
import json
import os
import shutil
import socket
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from ..arguments import check_integer
from ..processes.watchdog import begin_step, end_step

T = TypeVar("T")
_WRITER = ".writer"  # the file that is locked
_RAISED = {kind.__name__: kind for kind in (ValueError, FloatingPointError, OSError, RuntimeError)}


class DamagedError(ValueError):
    """The files of a checkpoint are not those that were written."""


class CheckpointFolder(abc.ABC):
    """What both packages do with a folder of checkpoints, ``directory``; a context manager."""

    package: ClassVar[str]
    format: ClassVar[int] = 2  # that this version reads and writes

    def __init__(
        self, directory: str | os.PathLike[str], *, keep: int = 3, warn: Callable[[str], None] = warnings.warn
    ) -> None:
        """Names a folder, which process 0 makes: the newest ``keep`` stay; ``warn`` gets lines about damaged ones."""
        self._keep, self._warn = check_integer("keep", keep), warn
        self.directory = Path(directory).absolute()
        self._where = f"in {str(self.directory)!r}"
        self._damaged: set[int] = set()
        self._lock: _Lock | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reserve(self) -> None:
        """Locks the folder until ``close``, as ``save`` does; raises a ValueError if another job has. All call it."""
        self._together(self._take_lock)

    def close(self) -> None:
        """Lets other jobs save into the folder; needs no other process."""
        self._lock = None

    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints, damaged or not, oldest first; an OSError if one may not be read."""
        found = []
        for path in map(self._path, os.listdir(self.directory) if self.directory.exists() else ()):
            if path.name.isdecimal() and path.name == str(int(path.name)) and path.is_dir():
                with contextlib.suppress(FileNotFoundError):  # another job has just removed it
                    if any(name == "about.json" or name.startswith("state") for name in os.listdir(path)):
                        found.append(int(path.name))
        return sorted(found)

    def latest_step(self) -> int | None:
        """Gives the step of the newest checkpoint that process 0 sees; None if there is none. All processes call it."""
        return self._together(lambda: max(self.steps(), default=None))

    def about(self, step: int) -> dict[str, Any]:
        """Describes a checkpoint without reading its arrays; needs no other process.

        It has ``format, step, strategy, num_ranks, saved_at, data_position``, and what else the package saved. Raises a
        ValueError if there is no such checkpoint, or it is damaged or written by another version.
        """
        if step not in (steps := self.steps()):
            raise ValueError(f"no {self._name(step)}: there are {', '.join(map(str, steps)) or 'none'}")
        about = _read_about(self._path(step))
        if about is None or about["step"] != step:
            raise DamagedError(f"{self._name(step)} is damaged or half-written")
        if (about["format"], about["package"]) != (self.format, self.package):
            written = f"format {about['format']} of {about['package']}"
            raise ValueError(f"{self._name(step)} has {written}: this is format {self.format} of {self.package}")
        return about

    @property
    @abc.abstractmethod
    def _place(self) -> tuple[int, int]:
        """This process's number in its job, and how many there are."""

    @abc.abstractmethod
    def _from_first(self, text: str) -> str:
        """Gives process 0's text in all."""

    def _together(self, function: Callable[[], T]) -> T:
        """Runs a function in process 0, which gives JSON that all get; what it raises, all raise."""
        number, count = self._place
        if count == 1:
            return function()
        begin_step(is_call=True)
        if number > 0:
            answer = json.loads(self._from_first("null"))
            end_step()
            if "raised" in answer:
                kind, text = answer["raised"]
                raise _RAISED[kind](text)
            return answer["found"]
        end_step()  # what it does may take long, and waits for nobody
        try:
            found = function()
        except BaseException as error:  # an interruption too: the others wait for an answer
            kind = next((name for name, kind in _RAISED.items() if isinstance(error, kind)), "")
            raised = (kind, str(error)) if kind else ("RuntimeError", f"process 0 raised {error!r}")
            self._from_first(json.dumps({"raised": raised}))
            raise
        self._from_first(json.dumps({"found": found}))
        return found

    def _take_lock(self) -> None:
        """Locks the folder, unless this process has, and removes what killed processes have left in it."""
        if self._lock is not None:
            return
        folder = self.directory
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._lock = _locks.get(_key(os.stat(folder / _WRITER)))
        if self._lock is not None:
            return
        if not os.access(folder, os.W_OK | os.X_OK):  # now, and not after hours of training
            raise PermissionError(f"directory (={str(folder)!r}) must be one that this process may write into")
        lock = _Lock(folder / _WRITER, "a+")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone, where flock's lasts in its forks
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            lock.seek(0)
            holding = lock.read().decode() or "another process"
            lock.close()  # the error may be kept, and closing it later would drop a lock that was taken since
            said = f"directory (={str(folder)!r}) is being written to by {holding}"
            raise ValueError(f"{said}: let that finish, or save into another folder") from None
        except OSError:  # a file system without locks
            pass
        _locks[_key(os.fstat(lock.fileno()))] = lock
        for left in [*folder.glob("*.partial"), *folder.glob("*.removed")]:
            if left.stem.isdecimal():
                shutil.rmtree(left, ignore_errors=True)
        self._lock = lock

    def _begin(self, step: int) -> None:
        """Makes way for a save, in process 0: renames damaged checkpoints of this or a later step."""
        self._take_lock()
        for damaged in [self._path(one) for one in self.steps() if one >= step and one in self._damaged]:
            names = (f"{damaged}.damaged{number or ''}" for number in itertools.count())
            damaged.rename(next(name for name in names if not os.path.lexists(name)))
        if step <= (newest := max(self.steps(), default=-1)):
            said = f"step (={step}) must be above {newest}, that of the newest checkpoint {self._where}"
            raise ValueError(f"{said}: save into another folder, or remove those of step {step} and later")

    def _write(self, about: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Has ``write`` write ``state...`` into a folder, adds ``about``, and removes the oldest checkpoint."""
        step, path, outer = about["step"], self._path(about["step"]), sys.exception()  # the last: what a caller handles
        partial, saved_at = path.with_name(f"{step}.partial"), datetime.now(UTC).isoformat(timespec="seconds")
        try:
            partial.mkdir()
            write(partial)
            head = {"format": self.format, "package": self.package, "saved_at": saved_at}
            files = {file.name: _on_disk(file) for file in sorted(partial.iterdir())}
            about = json.loads(json.dumps(head | about | {"files": files}))  # as it is read: keys are strings
            (partial / "about.json").write_text(json.dumps({"about": about, "crc32": _checksum(about)}))
            _on_disk(partial / "about.json")
            partial.rename(path)
        except Exception as error:
            inner = None if error.__context__ is outer else error.__context__  # torch raises its own meanwhile
            of_system = error if isinstance(error, OSError) else inner
            reason = getattr(of_system, "strerror", None) or str(error).partition("\n")[0]
            raise OSError(f"{self._name(step)} was not saved: {reason}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        ours = []  # what this program wrote and is not damaged: it removes no others
        for one in self.steps():
            with contextlib.suppress(OSError):
                ours += [one] if one not in self._damaged and _read_about(self._path(one)) else []
        for old in ours[: -self._keep]:
            removed = self._path(old).rename(self.directory / f"{old}.removed")  # half removed it is none
            shutil.rmtree(removed, ignore_errors=True)

    def _choose(self, step: int | None) -> dict[str, Any]:
        """Describes a checkpoint; without a step the newest, an older one where it is damaged."""
        damaged: dict[int, DamagedError] = {}
        for one in reversed(self.steps()) if step is None else [step]:
            try:
                about = self.about(one)
                for name, (num_bytes, checksum) in about["files"].items():
                    path = self._path(one) / name
                    if not path.is_file() or path.stat().st_size != num_bytes or _checksum_of(path) != checksum:
                        raise DamagedError(f"{self._name(one)} is damaged or half-written")
            except DamagedError as error:
                damaged[one] = error
                continue
            for newer in sorted(damaged.keys() - self._damaged):
                self._warn(f"{damaged[newer]}: took step {one}")
            self._damaged |= damaged.keys()
            return about
        raise next(iter(damaged.values()), ValueError(f"no checkpoint {self._where}"))

    def _name(self, step: int) -> str:
        return f"checkpoint of step {step} {self._where}"

    def _path(self, step: int | str) -> Path:
        return self.directory / str(step)


class _Lock(io.FileIO):
    """A locked file, until nothing of this process refers to it; the system unlocks those of a process that ends."""

    def __del__(self) -> None:
        self.close()


# By file, shared by all that save there: closing a file drops all locks that the process has on it. A fork has none.
_locks: weakref.WeakValueDictionary[tuple[int, int], _Lock] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_locks.clear)


def _key(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino


def check_finite(step: int, name: str, array: np.ndarray) -> None:
    """Refuses what must not be saved. A mask may hold infinities, and so may an optimizer's scalar, as a best loss."""
    if "float" not in array.dtype.name or (array.ndim == 0 and not name.startswith("params")):
        return
    bad = np.isnan(array) if name.startswith(("model_state", "buffers")) else ~np.isfinite(array)
    if bad.any():
        raise FloatingPointError(f"state of step {step} must be finite to be saved: {name} is not")


def _read_about(checkpoint: Path) -> dict[str, Any] | None:
    """What this program wrote about a checkpoint; None if it is damaged, or not this program's. Raises OSErrors."""
    try:
        written = json.loads((checkpoint / "about.json").read_bytes())
        return written["about"] if written["crc32"] == _checksum(written["about"]) else None
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _on_disk(path: Path) -> tuple[int, int]:
    """Size and checksum of a file, which is on the disk afterwards."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, _checksum_of(path)


def _checksum_of(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(2**22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _checksum(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())
