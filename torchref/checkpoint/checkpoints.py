"""Saves training states, and restores them on any ranks and under any strategy: the twin of ``jaxddp.checkpoint``.

A checkpoint does not depend on the ranks: it holds every tensor in full, in its own shape, under its own name
(``rank_state.py``), in one file of ``torch.save``, ``DIR/120/state.pt``, beside a description
(``jaxddp/checkpoint/folder.py``). Options of the optimizer's groups, such as a learning rate, are not saved: they are
those of the optimizer that restores.

Assumption: rank 0's host has memory for the whole state while it is written. No device holds more than one whole
tensor beside its shards.
"""

from collections.abc import Iterator
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jaxddp.arguments import check_integer
from jaxddp.checkpoint.folder import CheckpointFolder, check_finite
from jaxddp.checkpoint.weights import as_numpy
from jaxddp.processes.watchdog import begin_step, end_step

from ..agreement import check_alike, gather_texts
from ..registry import STRATEGIES
from ..train import Trainer
from .rank_state import RankState, num_ranks, rank

T = TypeVar("T")
_FILE = "state.pt"
_ANSWER_S = 1200  # for rank 0 to write


class Checkpoints(CheckpointFolder):
    """The checkpoints in one folder; a context manager that lets other jobs save there at its end.

    All ranks call ``reserve``, ``latest_step``, ``save`` and ``restore``, and all raise the same.
    """

    package = "torchref"

    def save(self, trainer: Trainer, step: int, *, data_position: Any = None) -> None:
        """Saves the state of a trainer's module and optimizer; returns once it is written.

        Args:
            trainer: After ``step`` steps, between two of them.
            step: Above that of the newest checkpoint; the same on all ranks.
            data_position: Where to continue in the data, as a JSON value; the same on all ranks.

        Raises:
            ValueError: If another job saves into the folder, it has a checkpoint of this or a later step, ranks differ,
                or the optimizer's state is not that of the module's parameters.
            FloatingPointError: If a parameter or the optimizer's state is not finite, or a buffer holds NaN.
            OSError: If it cannot be written, or the position is not JSON; older checkpoints stay.
        """
        step = check_integer("step", step, least=0)
        held = RankState.of(trainer)
        if num_ranks() > 1:
            check_alike({"step": step, "data_position": data_position})
        self._together(lambda: self._begin(step))
        begin_step(is_call=True)
        whole = held.gather()
        end_step()
        names = [name for name, strategy in STRATEGIES.items() if type(trainer.net) is strategy]
        strategy = names[0] if names else type(trainer.net).__name__
        place = {"step": step, "strategy": strategy, "num_ranks": num_ranks(), "data_position": data_position}

        def write() -> None:
            for name, one in whole.items():
                if torch.is_tensor(one):
                    check_finite(step, name, as_numpy(one))
            self._write(place | held.about, save)

        def save(folder: Path) -> None:
            with (folder / _FILE).open("xb") as file:  # whose errors are the system's
                torch.save(whole, file)

        self._together(write)

    def restore(self, trainer: Trainer, *, step: int | None = None) -> tuple[int, Any]:
        """Restores a state into a trainer's module and optimizer; gives the step and the data position.

        Args:
            trainer: May have other ranks and another strategy than the one that saved. Unchanged if the checkpoint is
                refused.
            step: Of the checkpoint; the newest that is not damaged on rank 0 if None.

        Raises:
            ValueError: If there is no such checkpoint, it is of another model, optimizer or dtype, damaged, or written
                by another version. Checkpoints are never changed.
        """
        about, held = self._together(lambda: self._choose(step)), RankState.of(trainer)
        saved: dict[str, Any] = {}

        def read() -> dict[str, Any]:
            path = self._path(about["step"]) / _FILE
            saved.update(torch.load(path, weights_only=True, mmap=True, map_location="cpu"))
            saved.update({f"state.{entry}": number for entry, number in about.get("numbers", {}).items()})  # before
            held.check_fits(saved, about, self._name(about["step"]))
            return {name: (one.shape, str(one.dtype)) if torch.is_tensor(one) else one for name, one in saved.items()}

        forms = self._together(read)
        begin_step(is_call=True)
        held.load(saved.items() if num_ranks() == 1 else self._sent(saved, forms))
        end_step()
        trainer.num_steps = about["step"]
        return about["step"], about["data_position"]

    def _sent(self, saved: dict[str, Any], forms: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Sends what rank 0 has read to the other ranks, one tensor after another."""
        for name, form in forms.items():
            one = saved.get(name, form)
            if isinstance(form, (list, tuple)):  # else it is a number
                shape, dtype = form
                one = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch."))) if rank() else one
                dist.broadcast(one.reshape(-1).view(torch.uint8), 0, self._group)
            yield name, one

    @property
    def _place(self) -> tuple[int, int]:
        return rank(), num_ranks()

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        """All ranks over Gloo: a large file on a slow disk would exceed the time-out of NCCL's collectives."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=_ANSWER_S))

    def _from_first(self, text: str) -> str:
        return gather_texts(text, self._group)[0]
