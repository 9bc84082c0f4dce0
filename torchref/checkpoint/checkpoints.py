"""Saves training states, and restores them on any ranks and under any strategy: the twin of ``jaxddp.checkpoint``.

A checkpoint does not depend on the ranks: it holds every tensor in full, in its own shape, under its own name
(``rank_state.py``), in one file, ``DIR/120.npz`` (``archive.py``). Rank 0 writes it, and every rank reads it. Options
of the optimizer's groups, such as a learning rate, are not saved: they are those of the optimizer that restores.

Assumption: rank 0's host has memory for the whole state while it is written. No device holds more than one whole tensor
beside its shards, and a rank that restores reads one tensor at a time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch import nn

from jaxddp.arguments import check_flag, check_integer
from jaxddp.checkpoint.folder import CheckpointFolder, DamagedError, refuse_nonfinite
from jaxddp.checkpoint.folder_lock import lock_folder, unlock_folder
from jaxddp.processes.watchdog import begin_step, end_step

from ..agreement import check_alike, gather_texts
from ..loss_scale import LossScale
from ..registry import STRATEGIES
from ..train import Trainer
from . import archive
from .rank_state import RankState, Whole, is_finite, num_ranks, rank

_ANSWER_S = 1200  # for rank 0 to write
_RAISED = {"ValueError": ValueError, "FloatingPointError": FloatingPointError, "OSError": OSError}
_patient: tuple[Any, Any] | None = None  # the group of all ranks, and that of ``_patient_group``
T = TypeVar("T")


class Checkpoints(CheckpointFolder):
    """The checkpoints in one folder; a context manager that lets others save there at its end.

    All ranks call ``reserve``, ``save``, ``restore`` and ``set_aside``, and all raise the same.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> net = nn.Linear(2, 1)
        >>> trainer = Trainer(lambda net, batch: net(batch["x"]).mean(), torch.optim.SGD(net.parameters(), lr=0.1), net)
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        ...     _ = trainer.step({"x": torch.ones(4, 2)})
        ...     checkpoints.save(trainer, step=1, data_position=4)
        ...     checkpoints.restore(trainer)
        (1, 4)
    """

    suffix = ".npz"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Opens a folder, and creates it if needed.

        Args:
            directory: The folder; on a shared file system if ranks are on several hosts. What else it holds is left
                alone.
            keep: Checkpoints to keep; older ones are removed once a newer one is complete.
            warn: Gets a line about each damaged checkpoint for which an older one is taken.

        Raises:
            ValueError: If ``keep`` is not positive, or the folder is a file or "".
            OSError: If it cannot be created.
        """
        super().__init__(directory, keep, warn)
        self._is_reserved = self._has_lock = False

    def reserve(self) -> None:
        """Locks the folder until ``close``, so that no other job saves there, not only during each save.

        Raises:
            ValueError: If another job has locked it.
            OSError: If it cannot be written.
        """
        self._on_first(self._lock)
        self._is_reserved = True

    def close(self) -> None:
        """Lets others save into the folder; needs no other rank."""
        self._is_reserved = False
        self._unlock()

    def save(self, trainer: Trainer, step: int, *, data_position: Any = None, set_aside: bool = False) -> None:
        """Saves the state of a trainer's module and optimizer; returns once it is written.

        Args:
            trainer: After ``step`` steps, between two of them.
            step: Above that of the newest checkpoint; the same on all ranks.
            data_position: Where to continue in the data, as a JSON value; the same on all ranks.
            set_aside: Writes it as ``set_aside`` leaves one: no checkpoint is removed for it, and none restores it.

        Raises:
            ValueError: If another job is writing to the folder, it has a checkpoint of this or a later step, ranks
                differ in step or position, the position is not JSON, some ranks train apart from others, or the
                optimizer's state is not that of the module's parameters.
            FloatingPointError: If a parameter or the optimizer's state is not finite, or a buffer holds NaN.
            OSError: If the file cannot be written; older checkpoints stay.
        """
        step = check_integer("step", step, least=0)

        check_flag(set_aside=set_aside)

        def describe() -> tuple[RankState, str]:
            try:
                position = json.dumps(data_position)
            except TypeError as error:
                raise ValueError(f"data_position (={data_position!r}) must be JSON: {error}") from error
            return RankState.of(trainer), position

        held, position = _on_each(describe)
        if num_ranks() > 1:
            check_alike({"step": step, "data_position": position})
        try:
            self._on_first(lambda: self._begin(step, set_aside))
            with _as_a_call():
                whole = held.gather()
            about = {
                "format": archive.FORMAT,
                "step": step,
                "strategy": _name_of(trainer.net),
                "num_ranks": num_ranks(),
                "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "data_position": json.loads(position),
                "loss_scale": trainer.loss_scale and asdict(trainer.loss_scale),
                "optimizer": type(held.optimizer).__name__,
                "state_has": held.state_has,
                "numbers": whole.numbers,
                "elementwise": whole.elementwise,
                "dtypes": {name: str(one.dtype).removeprefix("torch.") for name, one in whole.tensors.items()},
            }
            self._on_first(lambda: self._write(step, whole, about, set_aside))
        finally:
            if not self._is_reserved:
                self._unlock()

    def restore(self, trainer: Trainer, *, step: int | None = None) -> tuple[int, Any]:
        """Restores a state into a trainer's module and optimizer.

        Args:
            trainer: May have other ranks and another strategy than the one that saved. Unchanged if the checkpoint is
                refused.
            step: Of the checkpoint; the newest that is not damaged if None.

        Returns:
            The step, and the data position saved with it.

        Raises:
            ValueError: If there is no such checkpoint, it is of another model, optimizer or dtype, damaged, or written
                by a newer version, or ranks see others. Checkpoints are never changed.
            OSError: If it cannot be read.
        """

        def check() -> tuple[RankState, dict[str, Any]]:
            held = RankState.of(trainer)
            read = functools.partial(self._about, with_tensors=True)
            about = self._newest(read) if step is None else read(step)
            with archive.Reader(self._path(about["step"]), about) as reader:
                held.check_fits(reader, about, self._name(about["step"]))
            return held, about

        held, about = _on_each(check)
        if num_ranks() > 1:
            check_alike({"step of the checkpoint": about["step"], "it was saved at": about["saved_at"]})
        with archive.Reader(self._path(about["step"]), about) as reader:
            held.load(reader, about)
        if trainer.loss_scale is not None and about["loss_scale"] is not None:
            trainer.loss_scale = LossScale(**about["loss_scale"])
        trainer.num_steps = about["step"]
        return about["step"], about["data_position"]

    def about(self, step: int | None = None) -> dict[str, Any]:
        """Describes a checkpoint, without reading its tensors; needs no other rank.

        Args:
            step: Of the checkpoint; the newest that can be read if None.

        Returns:
            ``format, step, strategy, num_ranks, saved_at, data_position, loss_scale``, of the optimizer's state
            ``optimizer, state_has, numbers, elementwise``, and ``dtypes`` by name.

        Raises:
            ValueError: If there is no such checkpoint, or it is damaged or written by a newer version.
            OSError: If it cannot be read.
        """
        return self._newest(self._about) if step is None else self._about(step)

    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints, damaged or not, oldest first."""
        return sorted(
            int(path.stem) for path in self.directory.glob("*.npz") if re.fullmatch("0|[1-9][0-9]*", path.stem)
        )

    def _on_first(self, function: Callable[[], None]) -> None:
        """Runs a function in rank 0, however long it takes; all ranks raise what it raises."""
        if num_ranks() == 1:
            function()
            return
        group = _patient_group()
        raised: BaseException | None = None
        if rank() == 0:
            begin_step(is_call=True)
            end_step()  # it does not wait for the others
            try:
                function()
            except BaseException as error:  # the others must not wait for a rank that was interrupted
                raised = error
            gather_texts(json.dumps(_described(raised)), group)
            if raised is not None:
                raise raised
            return
        with _as_a_call():
            answer = json.loads(gather_texts("null", group)[0])
        if answer is not None:
            _raise(answer, 0)

    def _remove_aside(self) -> None:
        for earlier in filter(_is_ours, self.directory.glob("*.nonfinite.npz")):
            earlier.unlink()

    def _begin(self, step: int, set_aside: bool) -> None:
        self._lock()
        self._make_way(step, set_aside)
        for partial in self.directory.glob(f"*.{archive.PARTIAL}"):  # of a process that was killed here
            partial.unlink()

    def _write(self, step: int, whole: Whole, about: dict[str, Any], set_aside: bool) -> None:
        refuse_nonfinite(step, [name for name, tensor in whole.tensors.items() if not is_finite(name, tensor)])
        try:
            path = self.aside_path(step) if set_aside else self._path(step)
            archive.write(path, about, whole.tensors.items())
        except OSError as error:
            raise OSError(f"{self._name(step)} was not saved: {error.strerror}") from error
        for old in () if set_aside else self._sound_steps()[: -self._keep]:
            self._path(old).unlink()

    def _sound_steps(self) -> list[int]:
        """The steps of the checkpoints that this program wrote and has not found damaged: only these are removed."""
        return [step for step in self.steps() if step not in self._damaged and _is_ours(self._path(step))]

    def _about(self, step: int, with_tensors: bool = False) -> dict[str, Any]:
        name = self._name(step)
        if step not in (steps := self.steps()):
            raise ValueError(f"no {name}: there are {', '.join(map(str, steps))}")
        try:
            about = archive.check(self._path(step), with_tensors=with_tensors)
        except DamagedError as error:
            raise self._damage(step) from error
        if about["format"] > archive.FORMAT:
            raise ValueError(f"{name} has format {about['format']}, newer than {archive.FORMAT}: update torchref")
        if about["step"] != step:
            raise ValueError(f"{name} is that of step {about['step']}: remove or rename its file")
        return about

    def _lock(self) -> None:
        self._has_lock = lock_folder(self.directory) or self._has_lock  # another object of this process may have it

    def _unlock(self) -> None:
        if self._has_lock:
            self._has_lock = False
            unlock_folder(self.directory)


def _name_of(net: nn.Module) -> str:
    """The name of a wrapper's strategy; the class of another module."""
    return next((name for name, strategy in STRATEGIES.items() if type(net) is strategy), type(net).__name__)


def _is_ours(path: Path) -> bool:
    """Whether this program wrote a file."""
    try:
        return bool(archive.check(path, with_tensors=False))
    except (DamagedError, OSError):
        return False


@contextlib.contextmanager
def _as_a_call() -> Iterator[None]:
    """Tells the watchdog that this rank waits for the others, for it to end if one of them is lost."""
    begin_step(is_call=True)
    try:
        yield
    finally:
        end_step()


def _patient_group() -> dist.ProcessGroup:
    """All ranks over Gloo: a large file on a slow disk would exceed the time-out of NCCL's collectives."""
    global _patient
    world = dist.group.WORLD
    if _patient is None or _patient[0] is not world:
        _patient = world, dist.new_group(backend="gloo", timeout=timedelta(seconds=_ANSWER_S))
    return _patient[1]


def _on_each(function: Callable[[], T]) -> T:
    """Runs a function in all ranks; all raise what the first rank raises that does."""
    if num_ranks() == 1:
        return function()
    raised: Exception | None = None
    try:
        found = function()
    except Exception as error:
        raised = error
    answers = [json.loads(text) for text in gather_texts(json.dumps(_described(raised)))]
    if not any(answers):
        return found
    if raised is not None:
        raise raised
    first = next(number for number, answer in enumerate(answers) if answer)
    _raise(answers[first], first)


def _described(raised: BaseException | None) -> tuple[str, str] | None:
    if raised is None:
        return None
    kinds = [name for name, kind in _RAISED.items() if isinstance(raised, kind)]
    return (kinds or [type(raised).__name__])[0], str(raised)


def _raise(answer: tuple[str, str], where: int) -> NoReturn:
    kind, text = answer
    raise _RAISED[kind](text) if kind in _RAISED else RuntimeError(f"rank {where}: {kind}: {text}")
