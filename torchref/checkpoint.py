"""Saves training states, and restores them on any ranks and under any strategy: the twin of ``jaxddp.checkpoint``.

A checkpoint does not depend on the ranks: it holds every tensor in full, in its own shape, under its own name.

    save      whole[t]    = all-gather of shard[t, r], for what is sharded      all ranks
              DIR/120.npz = whole, renamed when it is complete                  rank 0
    restore   shard[t, r] = chunk r of whole[t]                                 all ranks read the file

    ===================== ============================ ==================================================
    in DIR/120.npz        shape                        holds
    ===================== ============================ ==================================================
    ``params.NAME``       ``[shape]``                  a parameter, frozen ones included
    ``buffers.NAME``      ``[shape]``                  a buffer, such as BatchNorm's running mean
    ``state.KEY.NAME``    ``[shape]``, or a number     the optimizer's state of it, such as ``exp_avg``
    ``error.NAME``        ``[shape]``                  PowerSGD's residuals, summed over the ranks
    ``factor.NAME``       ``[m, k]``                   its factor
    ``about``             JSON                         format, step, strategy, number of ranks, time, position
                                                       in the data, optimizer, scale of the loss, and the dtypes
    ===================== ============================ ==================================================

Nothing is pickled, and a changed byte is noticed: the archive has a checksum of each entry. Options of the optimizer's
groups, such as a learning rate, are not saved: they are those of the optimizer that restores.

Assumption: each rank has memory for one full copy of the parameters, and rank 0's host for the whole state.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jaxddp.checkpoint.folder_lock import lock_folder, unlock_folder

from .agreement import gather_texts
from .communication.collectives import all_gather
from .communication.low_rank import Memory
from .communication.sharding import local_shard
from .loss_scale import LossScale
from .strategy import STRATEGIES, DataParallel
from .train import Trainer
from .zero import FSDP, ShardedOptimizer, ZeRO1
from .zero.optimizers import rank_marks

FORMAT = 1
"""Of the checkpoints that this version writes."""

_UNREADABLE = (zipfile.BadZipFile, ValueError, LookupError, TypeError, EOFError, NotImplementedError, RecursionError)
_PARTIAL = "torchref-partial"
_MOST_ABOUT_BYTES = 2**28
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Checkpoints:
    """The checkpoints in one folder.

    All ranks call every method, and all raise the same.
    """

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
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep (={keep!r}) must be a positive integer")
        if not isinstance(directory, (str, os.PathLike)):
            raise ValueError(f"directory (={directory!r}) must be a path")
        if not os.fspath(directory):
            raise ValueError("directory (='') must name a folder")
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"directory (={str(self.directory)!r}) must be a folder, it is a file")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._keep, self._warn = keep, warn
        self._is_reserved = False
        self._damaged: set[int] = set()

    def __enter__(self) -> Checkpoints:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Lets others save into the folder."""
        self.close()

    def reserve(self) -> None:
        """Locks the folder until ``close``, so that no other job saves there, not only during each save.

        Raises:
            ValueError: If another job has locked it.
            OSError: If it cannot be written.
        """
        _on_first(lambda: lock_folder(self.directory))
        self._is_reserved = True

    def close(self) -> None:
        """Lets others save into the folder; needs no other rank."""
        self._is_reserved = False
        if _rank() == 0:
            unlock_folder(self.directory)

    def save(self, trainer: Trainer, step: int, *, data_position: Any = None) -> None:
        """Saves the state of a trainer's module and optimizer; returns once it is written.

        Args:
            trainer: After ``step`` steps, between two of them.
            step: Above that of the newest checkpoint.
            data_position: Where to continue in the data, as a JSON value.

        Raises:
            ValueError: If another job is writing to the folder, it has a checkpoint of this or a later step, the
                position is not JSON, or the state is not that of all ranks.
            FloatingPointError: If a parameter or the optimizer's state is not finite.
            OSError: If the file cannot be written; older checkpoints stay.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step (={step!r}) must be an integer and not negative")
        try:
            data_position = json.loads(json.dumps(data_position))
        except (TypeError, ValueError) as error:
            raise ValueError(f"data_position (={data_position!r}) must be JSON: {error}") from error
        held = _Held.of(trainer)
        _on_first(lambda: self._begin(step))
        try:
            tensors, numbers = held.gather()
            about = {
                "format": FORMAT,
                "step": step,
                "strategy": _name_of(trainer.net),
                "num_ranks": _num_ranks(),
                "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "data_position": data_position,
                "optimizer": type(held.optimizer).__name__,
                "loss_scale": trainer.loss_scale and asdict(trainer.loss_scale),
                "numbers": numbers,
                "dtypes": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
            }
            _on_first(lambda: self._write(step, tensors, about))
        finally:
            if not self._is_reserved and _rank() == 0:
                unlock_folder(self.directory)

    def restore(self, trainer: Trainer, *, step: int | None = None) -> tuple[int, Any]:
        """Restores a state into a trainer's module and optimizer.

        Args:
            trainer: May have other ranks and another strategy than the one that saved, which keeps the parameters, or
                shards, of its own optimizer. Unchanged if the checkpoint is refused.
            step: Of the checkpoint; the newest that is not damaged if None.

        Returns:
            The step, and the data position saved with it.

        Raises:
            ValueError: If there is no such checkpoint, or it is of another model, optimizer or dtype, damaged, or
                written by a newer version. Checkpoints are never changed.
        """
        held = _Held.of(trainer)

        def read(step: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
            with self._reading(step) as archive:
                about = self._about(step, archive)
                return about, {name: _tensor(_array(archive, name), dtype) for name, dtype in about["dtypes"].items()}

        about, tensors = self._newest(read) if step is None else read(step)
        taken = [json.loads(text) for text in gather_texts(str(about["step"]))] if dist.is_initialized() else []
        if len(set(taken)) > 1:
            raise ValueError(f"ranks read checkpoints of steps {taken} {self._where}: share the folder between hosts")
        held.load(tensors, about, f"checkpoint of step {about['step']} {self._where}")
        if trainer.loss_scale is not None and about["loss_scale"] is not None:
            trainer.loss_scale = LossScale(**about["loss_scale"])
        return about["step"], about["data_position"]

    def about(self, step: int | None = None) -> dict[str, Any]:
        """Describes a checkpoint, without reading its tensors.

        Args:
            step: Of the checkpoint; the newest that can be read if None.

        Returns:
            ``format, step, strategy, num_ranks, saved_at, data_position, optimizer, loss_scale``, and ``dtypes`` and
            ``numbers`` of the state by name.

        Raises:
            ValueError: If there is no such checkpoint, or it is damaged or written by a newer version.
        """

        def read(step: int) -> dict[str, Any]:
            with self._reading(step) as archive:
                return self._about(step, archive)

        return self._newest(read) if step is None else read(step)

    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints, oldest first."""
        return sorted(
            int(path.stem) for path in self.directory.glob("*.npz") if re.fullmatch("0|[1-9][0-9]*", path.stem)
        )

    def latest_step(self) -> int | None:
        """Returns the step of the newest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def set_aside(self, step: int) -> str | None:
        """Renames the newest checkpoint to ``STEP.nonfinite.npz`` if it is of this step and an older one is left.

        For states that look sound, and make every step that follows NaN or infinite. Only the last that was set aside
        is kept; renamed back, it can be restored.

        Returns:
            The new name, in rank 0; None if nothing was renamed.

        Raises:
            OSError: If it cannot be renamed.
        """
        renamed: list[str] = []

        def rename() -> None:
            if len(steps := self.steps()) > 1 and steps[-1] == step:
                for earlier in filter(_is_ours, self.directory.glob("*.nonfinite.npz")):
                    earlier.unlink()
                renamed.append(self._path(step).rename(self.directory / f"{step}.nonfinite.npz").name)

        _on_first(rename)
        return renamed[0] if renamed else None

    def _begin(self, step: int) -> None:
        lock_folder(self.directory)
        for damaged in [one for one in self._damaged if one >= step and self._path(one).exists()]:
            names = itertools.chain([f"{damaged}.damaged"], (f"{damaged}.damaged-{n}" for n in itertools.count(2)))
            free = next(path for path in map(self.directory.joinpath, names) if not path.exists())
            self._path(damaged).rename(free)
        newest = self.latest_step()
        if newest is not None and step <= newest:
            raise ValueError(
                f"step (={step}) must be above {newest}, that of the newest checkpoint {self._where}: save into another"
                f" folder, or remove those of step {step} and later"
            )
        for partial in self.directory.glob(f"*.{_PARTIAL}"):  # of a process that was killed here
            partial.unlink()

    def _write(self, step: int, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        if nonfinite := [name for name, tensor in tensors.items() if not _is_finite(name, tensor)]:
            more = f" and {len(nonfinite) - 3} more" * (len(nonfinite) > 3)
            raise FloatingPointError(
                f"state of step {step} must be finite to be saved: {', '.join(nonfinite[:3])}{more} are not"
            )
        path = self._path(step)
        partial = path.with_suffix(f".{_PARTIAL}")
        try:
            with open(partial, "xb") as file:
                with zipfile.ZipFile(file, "w") as archive:
                    _write_array(archive, "about", np.frombuffer(json.dumps(about).encode(), np.uint8))
                    for name, tensor in tensors.items():
                        _write_array(archive, name, _array_of(tensor))
                file.flush()
                os.fsync(file.fileno())  # the name must not be on the disk before what it names
            partial.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)  # a full disk must not stay full
            raise OSError(f"checkpoint of step {step} {self._where} was not saved: {error.strerror}") from error
        ours = [one for one in map(self._path, self.steps()) if _is_ours(one)]
        for old in ours[: -self._keep]:
            old.unlink()

    def _newest(self, read: Callable[[int], Any]) -> Any:
        """Reads the newest checkpoint, an older one where it is damaged."""
        damaged: list[tuple[int, _DamagedError]] = []
        for step in reversed(self.steps()):
            try:
                found = read(step)
            except _DamagedError as error:
                damaged.append((step, error))
                continue
            for newer, _ in damaged:
                if newer not in self._damaged:
                    self._warn(f"checkpoint of step {newer} {self._where} is damaged or half-written: took step {step}")
            self._damaged.update(newer for newer, _ in damaged)
            return found
        raise damaged[0][1] if damaged else ValueError(f"no checkpoint in {str(self.directory)!r}")

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[zipfile.ZipFile]:
        if step not in (steps := self.steps()):
            raise ValueError(f"no checkpoint of step {step} {self._where}: there are {', '.join(map(str, steps))}")
        try:
            if not self._path(step).is_file():
                raise ValueError("no file")  # a pipe would be read for ever
            with zipfile.ZipFile(self._path(step)) as archive:
                yield archive
        except (_NewerError, _DamagedError):
            raise
        except (*_UNREADABLE, OSError) as error:
            raise _DamagedError(
                f"checkpoint of step {step} {self._where} is damaged or half-written: remove it to go on from an older"
                " one"
            ) from error

    def _about(self, step: int, archive: zipfile.ZipFile) -> dict[str, Any]:
        about = _read_about(archive)
        if about["format"] > FORMAT:
            raise _NewerError(
                f"checkpoint of step {step} {self._where} has format {about['format']}, newer than {FORMAT}: update"
                " torchref"
            )
        if about["step"] != step:
            raise _NewerError(
                f"checkpoint of step {step} {self._where} is that of step {about['step']}: remove or rename its file"
            )
        return about

    def _path(self, step: int) -> Path:
        return self.directory / f"{step}.npz"

    @property
    def _where(self) -> str:
        return f"in {str(self.directory)!r}"


class _DamagedError(ValueError):
    """A checkpoint whose file is not the one that was written."""


class _NewerError(ValueError):
    """A checkpoint that is sound, and not for this program."""


class _Held(NamedTuple):
    """What a rank holds of a training state.

    Attributes:
        net: The wrapper, or a module of one process.
        module: What it wraps.
        optimizer: Over parameters, or this rank's shards of them.
        updated: What the optimizer updates of each parameter, by name: itself, ``[shape]``, or a shard, ``[c]``.
        shapes: Of the whole parameters, by name.
        sharded: Names of the parameters whose optimizer state is sharded.
    """

    net: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    updated: dict[str, torch.Tensor]
    shapes: dict[str, torch.Size]
    sharded: frozenset[str]

    @classmethod
    def of(cls, trainer: Trainer) -> _Held:
        """What this rank's trainer holds.

        Raises:
            ValueError: If some ranks train apart from the others, or single ranks keep state of whole parameters.
        """
        net: Any = trainer.net
        optimizer: Any = net.optimizer if isinstance(net, ZeRO1) else trainer.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ShardedOptimizer):
            raise ValueError(f"optimizer (={type(optimizer).__name__}) must be torch's, or that of zero1 or zero2")
        if isinstance(net, DataParallel) and net.num_ranks != _num_ranks():
            raise ValueError(f"num_ranks (={net.num_ranks}) must be all {_num_ranks()} of the job")
        module = net.module if isinstance(net, (DataParallel, DistributedDataParallel)) else net
        updated: dict[str, torch.Tensor] = dict(module.named_parameters())
        shapes = {name: parameter.shape for name, parameter in updated.items()}
        sharded: frozenset[str] = frozenset()
        if isinstance(net, ZeRO1):
            updated |= net._shards
            sharded = frozenset(net._shards)
        elif isinstance(net, FSDP):
            sharded = net._sharded
            full = net.full_shapes()
            shapes = {name: full.get(name, shape) for name, shape in shapes.items()}
        return cls(net, module, optimizer, updated, shapes, sharded)

    @torch.no_grad()
    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The whole tensors by their names in a checkpoint, on rank 0's host, and the state that is numbers."""
        whole: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}

        def keep(name: str, tensor: torch.Tensor) -> None:
            if _rank() == 0:
                whole[name] = tensor.detach().cpu()

        params = self.net.gather_full_params() if isinstance(self.net, FSDP) else dict(self.module.named_parameters())
        for name in self.shapes:
            keep(f"params.{name}", params[name])
        del params
        for name, buffer in self.module.named_buffers():
            keep(f"buffers.{name}", buffer)
        for name, updated in self.updated.items():
            for key, value in self.optimizer.state.get(updated, {}).items():
                if not isinstance(value, torch.Tensor):
                    numbers[f"{key}.{name}"] = value
                elif name in self.sharded and key != "step" and value.shape == updated.shape:
                    keep(f"state.{key}.{name}", self._gather(name, value))
                else:
                    keep(f"state.{key}.{name}", value)
        for name, memory in self._memory().items():
            error = memory.error.clone()
            dist.all_reduce(error)
            keep(f"error.{name}", error)
            keep(f"factor.{name}", memory.factor)
        return whole, numbers

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any], checkpoint: str) -> None:
        """Takes this rank's part of the whole tensors of a checkpoint.

        Raises:
            ValueError: If they are of another model, optimizer or dtype.
        """
        buffers = dict(self.module.named_buffers())
        self._check_fits(tensors, about, buffers, checkpoint)
        shards = self.sharded if isinstance(self.net, FSDP) else ()
        for name, parameter in self.module.named_parameters():
            whole = tensors[f"params.{name}"]
            parameter.copy_(self._cut(whole) if name in shards else whole)
        for name, buffer in buffers.items():
            buffer.copy_(tensors[f"buffers.{name}"])

        numbers = {id(one): number for number, one in enumerate(_params_of(self.optimizer))}
        state: dict[int, dict[str, Any]] = {}
        for entry, value in self._state_of(tensors, about).items():
            key, _, name = entry.partition(".")
            is_cut = isinstance(value, torch.Tensor) and name in self.sharded and key != "step"
            state.setdefault(numbers[id(self.updated[name])], {})[key] = self._cut(value) if is_cut else value
        marks = rank_marks(self.net.process_group) if isinstance(self.net, ZeRO1) else {}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state} | marks)

        for name, memory in self._memory().items():
            error, factor = tensors.get(f"error.{name}"), tensors.get(f"factor.{name}")
            if error is not None:
                memory.error.copy_(error / _num_ranks())
            if factor is not None and factor.shape == memory.factor.shape:  # else of another rank of PowerSGD
                memory.factor.copy_(factor)

    def _check_fits(
        self,
        tensors: Mapping[str, torch.Tensor],
        about: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
        checkpoint: str,
    ) -> None:
        there = {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}
        here = {f"params.{name}": (self.updated[name].dtype, tuple(shape)) for name, shape in self.shapes.items()}
        here |= {f"buffers.{name}": (one.dtype, tuple(one.shape)) for name, one in buffers.items()}
        for name in here | {name: None for name in there if name.startswith(("params.", "buffers."))}:
            if there.get(name) != here.get(name):
                found = [" ".join(map(str, one[name])) if name in one else "missing" for one in (there, here)]
                raise ValueError(f"{checkpoint} is of another model: {name} is {found[0]} there and {found[1]} here")
        optimizer = type(self.optimizer).__name__
        if _same_state(about["optimizer"]) != _same_state(optimizer):
            raise ValueError(f"{checkpoint} is of another optimizer: {about['optimizer']} there and {optimizer} here")
        known = {id(one) for one in _params_of(self.optimizer)}
        for entry, value in self._state_of(tensors, about).items():
            key, _, name = entry.partition(".")
            if name not in self.updated or id(self.updated[name]) not in known:
                raise ValueError(f"{checkpoint} has {key} of {name!r}, which the optimizer here does not update")
            if name in self.sharded and isinstance(value, torch.Tensor) and key != "step":
                if value.shape != self.shapes[name]:
                    raise ValueError(
                        f"{checkpoint} has {key} of {name!r} of shape {tuple(value.shape)}, which cannot be sharded as"
                        f" the parameter (={tuple(self.shapes[name])}) is"
                    )

    @staticmethod
    def _state_of(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state, by ``KEY.NAME``."""
        return about["numbers"] | {
            name.removeprefix("state."): tensor for name, tensor in tensors.items() if name.startswith("state.")
        }

    def _gather(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        shape: torch.Size = self.shapes[name]
        return all_gather(shard)[: shape.numel()].view(shape)

    def _cut(self, whole: torch.Tensor) -> torch.Tensor:
        return local_shard(whole, _num_ranks(), _rank()).clone()

    def _memory(self) -> dict[str, Memory]:
        return self.net.memory if isinstance(self.net, DataParallel) else {}


def _name_of(net: nn.Module) -> str:
    """The name of a wrapper's strategy; the class of another module."""
    return next((name for name, strategy in STRATEGIES.items() if type(net) is strategy), type(net).__name__)


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, numbered as its ``state_dict`` does."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def _same_state(optimizer: str) -> str:
    """The name of the optimizer whose state one keeps."""
    return "Adam" if optimizer == "AdamW" else optimizer


def _on_first(function: Callable[[], None]) -> None:
    """Runs a function in rank 0; all ranks raise what it raises."""
    if _num_ranks() == 1:
        function()
        return
    raised: BaseException | None = None
    if _rank() == 0:
        try:
            function()
        except BaseException as error:  # the others must not wait for a rank that was interrupted
            raised = error
    told = gather_texts(json.dumps([type(raised).__name__, str(raised)] if raised else None))[0]
    if raised is not None:
        raise raised
    if answer := json.loads(told):
        kinds: dict[str, type[Exception]] = {"ValueError": ValueError, "FloatingPointError": FloatingPointError}
        raise kinds.get(answer[0], OSError)(answer[1])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _is_ours(path: Path) -> bool:
    """Whether a file is what this program writes, which alone it removes."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(_read_about(archive))
    except (*_UNREADABLE, OSError):
        return False


def _read_about(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Reads the description of a checkpoint.

    Raises:
        ValueError: If there is another one.
        KeyError: If there is none.
    """
    if archive.getinfo("about.npy").file_size > _MOST_ABOUT_BYTES:
        raise ValueError("too large")
    about = json.loads(_array(archive, "about").astype(np.uint8).tobytes())
    kinds = {"format": int, "step": int, "strategy": str, "num_ranks": int, "optimizer": str, "dtypes": dict}
    if not all(type(about[name]) is kind for name, kind in kinds.items()) or type(about["numbers"]) is not dict:
        raise ValueError("another description")
    return about


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    # Not np.savez: it reserves some names, and pickles unknown types.
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):  # the checksum is compared at the end
            raise ValueError("more than an array")
        return array


def _array_of(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor; the bits of one whose dtype NumPy lacks."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.contiguous().view(_INTEGERS[tensor.itemsize]).numpy()


def _tensor(array: np.ndarray, dtype_name: str) -> torch.Tensor:
    """What ``_array_of`` was given.

    Raises:
        ValueError: If there is no such dtype.
    """
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {dtype_name!r}")
    return torch.from_numpy(array).view(dtype)


def _is_finite(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor has no NaN or infinity; scalars of an optimizer may, such as the best loss so far."""
    is_checked = tensor.ndim > 0 or name.startswith("params.")
    return not is_checked or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
