"""A folder of checkpoints: each is complete or not there, the newest are kept, damaged ones are passed over.

``DIR/120`` is the checkpoint of step 120. In it:

    ``state...``      arrays, in the format of the framework
    ``about.json``    format, step, time, position in the data, what the package adds; size and CRC-32 of each file

A save writes ``DIR/120.partial`` and renames it. One job at a time saves into a folder: it locks ``DIR/.writer``.

In a job of several processes, process 0 alone writes, and decides which checkpoint is restored. All compare its
checksum and that of each file before one of them goes on, and all raise what one raises.

Both packages use this file; no framework is imported.
"""

import abc
import fcntl
import json
import os
import shutil
import socket
import warnings
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from ..arguments import check_integer
from ..processes.watchdog import begin_step, end_step

T = TypeVar("T")
_RAISED = {kind.__name__: kind for kind in (ValueError, FloatingPointError, OSError, RuntimeError)}


class DamagedError(ValueError):
    """The files of a checkpoint are not those that were written."""


class CheckpointFolder(abc.ABC):
    """What both packages do with a folder of checkpoints, ``directory``; a context manager."""

    package: ClassVar[str]
    format: ClassVar[int] = 2  # that this version reads and writes
    one: ClassVar[str] = "process"  # what one of the job is called

    def __init__(
        self, directory: str | os.PathLike[str], *, keep: int = 3, warn: Callable[[str], None] = warnings.warn
    ) -> None:
        """Opens a folder, and creates it if needed.

        Args:
            directory: The folder, which all processes of a job see. What else it holds is left alone.
            keep: Checkpoints to keep; older ones are removed once a newer one is complete.
            warn: Gets a line about each damaged checkpoint for which an older one is taken.
        """
        self._keep, self._warn = check_integer("keep", keep), warn
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._writer: Any = None  # the locked file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reserve(self) -> None:
        """Locks the folder until ``close``, as ``save`` does; raises a ValueError if another job has. All call it."""
        self._together(self._lock)

    def close(self) -> None:
        """Lets other jobs save into the folder; needs no other process."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints that this process sees, damaged or not, oldest first."""
        names = {path.parent.name for path in self.directory.glob("*/about.json")}
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def latest_step(self) -> int | None:
        """Gives the step of the newest checkpoint that process 0 sees; None if there is none. All processes call it."""
        return self._together(lambda: max(self.steps(), default=None))

    def about(self, step: int) -> dict[str, Any]:
        """Describes a checkpoint without reading its arrays; needs no other process.

        It has ``format, step, strategy, num_ranks, saved_at, data_position``, and what else the package saved about it.

        Raises a ValueError if there is no such checkpoint, or it is damaged or written by another version.
        """
        if step not in (steps := self.steps()):
            raise ValueError(f"no {self._name(step)}: there are {', '.join(map(str, steps)) or 'none'}")
        about = _read_about(self._path(step))
        if about is None or about["step"] != step:
            raise self._damage(step)
        if (about["format"], about["package"]) != (self.format, self.package):
            written = f"format {about['format']} of {about['package']}"
            raise ValueError(f"{self._name(step)} has {written}: this is format {self.format} of {self.package}")
        return about

    @property
    @abc.abstractmethod
    def _place(self) -> tuple[int, int]:
        """This process's number in its job, and how many there are."""

    @abc.abstractmethod
    def _exchange(self, text: str) -> list[str]:
        """Gives the texts of all processes."""

    def _together(self, function: Callable[[], T], each: bool = False) -> T:
        """Runs a function in process 0, which gives JSON that all get, or in each; what one raises, all raise."""
        number, count = self._place
        if count == 1:
            return function()
        if number == 0:  # it begins what the others wait for: it may take long, and waits for nobody
            begin_step(is_call=True)
            end_step()
        found: Any = None
        raised: Exception | None = None
        try:
            found = function() if each or number == 0 else None
        except Exception as error:
            raised = error
        if number > 0:
            begin_step(is_call=True)
        kind = next((name for name, kind in _RAISED.items() if isinstance(raised, kind)), "RuntimeError")
        said = {"raised": [kind, str(raised)]} if raised else {"found": None if each else found}
        answers = [json.loads(text) for text in self._exchange(json.dumps(said))]
        end_step()
        failed = next((number for number, answer in enumerate(answers) if "raised" in answer), None)
        if failed is None:
            return found if each else answers[0]["found"]
        kind, text = answers[failed]["raised"]
        is_of_all = not each or answers.count(answers[failed]) == count
        raise _RAISED[kind](text if is_of_all else f"{self.one} {failed}: {text}") from raised

    def _lock(self) -> None:
        """Locks the folder; the system drops the lock of a process that ends. A file system without locks has none."""
        if self._writer is not None:
            return
        file = open(self.directory / ".writer", "a+b", buffering=0)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone, where flock's lasts in its forks
        except BlockingIOError:
            with file:
                file.seek(0)
                holding = file.read().decode()
            said = f"directory (={str(self.directory)!r}) is being written to by {holding}"
            raise ValueError(f"{said}: let that finish, or save into another folder") from None
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._writer = file
        for left in [*self.directory.glob("[0-9]*.partial"), *self.directory.glob("[0-9]*.removed")]:
            shutil.rmtree(left, ignore_errors=True)  # by a process that was killed

    def _begin(self, step: int) -> None:
        """Makes way for a save, in process 0: renames damaged checkpoints of this or a later step."""
        self._lock()
        for later in [one for one in self.steps() if one >= step]:
            try:
                self._about_sound(later)
            except DamagedError:
                self._path(later).rename(self.directory / f"{later}.damaged")
                continue
            said = f"step (={step}) must be above {self.steps()[-1]}, that of the newest checkpoint {self._where}"
            raise ValueError(f"{said}: save into another folder, or remove those of step {step} and later")

    def _write(self, about: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Writes a checkpoint that ``about`` describes, then removes the oldest; in process 0.

        ``write`` writes the arrays into a folder, under names that begin with ``state``.
        """
        step, path = about["step"], self._path(about["step"])
        partial, saved_at = path.with_name(f"{step}.partial"), datetime.now(UTC).isoformat(timespec="seconds")
        try:
            partial.mkdir()
            write(partial)
            head = {"format": self.format, "package": self.package, "saved_at": saved_at}
            about = head | about | {"files": {file.name: _on_disk(file) for file in sorted(partial.iterdir())}}
            (partial / "about.json").write_text(json.dumps({"about": about, "crc32": _checksum(about)}))
            _on_disk(partial / "about.json")
            partial.rename(path)
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise OSError(f"{self._name(step)} was not saved: {reason}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        for old in self.steps()[: -self._keep]:
            if _read_about(self._path(old)) is not None:  # this program wrote it
                removed = self._path(old).rename(self.directory / f"{old}.removed")  # half removed it is none
                shutil.rmtree(removed, ignore_errors=True)

    def _agree(self, step: int | None) -> dict[str, Any]:
        """Describes the checkpoint that process 0 takes, once all processes have read the same, sound one."""
        first = self._together(lambda: self._choose(step))

        def compare() -> None:
            if self._place[0] and self._about_sound(first["step"]) != first:
                raise ValueError(f"{self._name(first['step'])} is not the one of that step that {self.one} 0 reads")

        self._together(compare, each=True)
        return first

    def _choose(self, step: int | None) -> dict[str, Any]:
        """Describes a checkpoint; without a step the newest, an older one where it is damaged."""
        if step is not None:
            return self._about_sound(step)
        damaged: list[DamagedError] = []
        for one in reversed(self.steps()):
            try:
                found = self._about_sound(one)
            except DamagedError as error:
                damaged.append(error)
                continue
            for error in damaged:
                self._warn(f"{error}: took step {one}")
            return found
        raise damaged[0] if damaged else ValueError(f"no checkpoint {self._where}")

    def _about_sound(self, step: int) -> dict[str, Any]:
        """Describes a checkpoint whose files are what was written."""
        about = self.about(step)
        for name, (num_bytes, checksum) in about["files"].items():
            path = self._path(step) / name
            if not path.is_file() or path.stat().st_size != num_bytes or _checksum_of(path) != checksum:
                raise self._damage(step)
        return about

    def _damage(self, step: int) -> DamagedError:
        return DamagedError(f"{self._name(step)} is damaged or half-written")

    def _name(self, step: int) -> str:
        return f"checkpoint of step {step} {self._where}"

    @property
    def _where(self) -> str:
        return f"in {str(self.directory)!r}"

    def _path(self, step: int) -> Path:
        return self.directory / str(step)


def refuse_nonfinite(step: int, names: Sequence[str]) -> None:
    """Raises a FloatingPointError if there are names of what is not finite in a state to be saved."""
    if names:
        raise FloatingPointError(f"state of step {step} must be finite to be saved: {', '.join(names[:3])} are not")


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
