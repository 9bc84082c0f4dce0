"""A folder of checkpoints: which of them are restored, passed over, set aside or in the way of a save.

``DIR/120`` is the checkpoint of step 120, ``DIR/120.nonfinite`` one that was set aside; ``torchref`` adds ``.npz``.
Both packages use it; no framework.
"""

from __future__ import annotations

import abc
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from ..arguments import check_integer, check_kind

T = TypeVar("T")


class DamagedError(ValueError):
    """The files of a checkpoint are not those that were written."""


class CheckpointFolder(abc.ABC):
    """What both packages do with a folder of checkpoints; a context manager."""

    suffix: ClassVar[str] = ""

    def __init__(self, directory: str | os.PathLike[str], keep: int, warn: Callable[[str], None]) -> None:
        """Opens a folder, and creates it if needed.

        Raises:
            ValueError: If ``keep`` is not positive, or the folder is a file or "".
            OSError: If it cannot be created.
        """
        keep = check_integer("keep", keep)
        check_kind("directory", directory, (str, os.PathLike), "a path")
        if not os.fspath(directory):
            raise ValueError("directory (='') must name a folder")
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"directory (={str(self.directory)!r}) must be a folder, it is a file")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._keep, self._warn = keep, warn
        self._damaged: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Lets others save into the folder."""

    @abc.abstractmethod
    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints, oldest first."""

    def latest_step(self) -> int | None:
        """Returns the step of the newest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def set_aside(self, step: int) -> str | None:
        """Renames the newest checkpoint to ``STEP.nonfinite`` if it is of this step and an older one is left.

        For states that look sound, and make every step that follows NaN or infinite. Only the last that was set aside
        is kept; renamed back, it can be restored. All processes of a job call it.

        Returns:
            The new name, in process 0; None if nothing was renamed.

        Raises:
            OSError: If it cannot be renamed, or the last save failed.
        """
        renamed: list[str] = []

        def rename() -> None:
            if len(steps := self._sound_steps()) > 1 and steps[-1] == step:
                self._remove_aside()
                renamed.append(self._path(step).rename(self.aside_path(step)).name)

        self._on_first(rename)
        return renamed[0] if renamed else None

    @abc.abstractmethod
    def _on_first(self, function: Callable[[], None]) -> None:
        """Runs a function in process 0; all processes that call this raise what it raises."""

    @abc.abstractmethod
    def _remove_aside(self) -> None:
        """Removes what was set aside before."""

    def _sound_steps(self) -> list[int]:
        """The steps of the checkpoints that are taken for sound."""
        return self.steps()

    def _make_way(self, step: int, set_aside: bool) -> None:
        """Renames damaged checkpoints of this and later steps, and refuses to save before the newest."""
        for damaged in [one for one in self._damaged if one >= step and self._path(one).exists()]:
            names = itertools.chain([f"{damaged}.damaged"], (f"{damaged}.damaged-{n}" for n in itertools.count(2)))
            free = next(path for path in map(self.directory.joinpath, names) if not path.exists())
            self._path(damaged).rename(free)
        newest = self.latest_step()
        if set_aside:
            self._remove_aside()
        elif newest is not None and step <= newest:
            raise ValueError(
                f"step (={step}) must be above {newest}, that of the newest checkpoint {self._where}: save into another"
                f" folder, or remove those of step {step} and later"
            )

    def _newest(self, read: Callable[[int], T]) -> T:
        """Reads the newest checkpoint, an older one where it is damaged."""
        damaged: list[tuple[int, DamagedError]] = []
        for step in reversed(self.steps()):
            try:
                found = read(step)
            except DamagedError as error:
                damaged.append((step, error))
                continue
            for newer, _ in damaged:
                if newer not in self._damaged:
                    self._warn(f"{self._name(newer)} is damaged or half-written: took step {step}")
            self._damaged.update(newer for newer, _ in damaged)
            return found
        raise damaged[0][1] if damaged else ValueError(f"no checkpoint in {str(self.directory)!r}")

    def _damage(self, step: int) -> DamagedError:
        return DamagedError(f"{self._name(step)} is damaged or half-written: remove it to go on from an older one")

    def _name(self, step: int) -> str:
        return f"checkpoint of step {step} {self._where}"

    @property
    def _where(self) -> str:
        return f"in {str(self.directory)!r}"

    def _path(self, step: int) -> Path:
        return self.directory / f"{step}{self.suffix}"

    def aside_path(self, step: int) -> Path:
        """Where a checkpoint is that was set aside."""
        return self.directory / f"{step}.nonfinite{self.suffix}"


def refuse_nonfinite(step: int, names: Sequence[str]) -> None:
    """Refuses to save a state that is not finite.

    Raises:
        FloatingPointError: If there are names of what is not.
    """
    if names:
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        raise FloatingPointError(
            f"state of step {step} must be finite to be saved: {', '.join(names[:3])}{more} are not"
        )
