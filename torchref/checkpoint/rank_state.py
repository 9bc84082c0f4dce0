"""A rank's part of a training state, and the whole of it that a checkpoint holds.

gather    whole[t]    = all-gather of shard[t, r], for what is sharded; tensor by tensor       rank 0 keeps it
load      shard[t, r] = chunk r of whole[t]                                                    tensor by tensor

===================== ======================== ==================================================
in the checkpoint     shape                    is
===================== ======================== ==================================================
``params.NAME``       ``[shape]``              a parameter, frozen ones included
``buffers.NAME``      ``[shape]``              a buffer of the ``state_dict``, such as a running mean
``state.KEY.NAME``    ``[shape]``, or another  the optimizer's state of it, such as ``exp_avg``
===================== ======================== ==================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jaxddp.arguments import check_kind

from ..communication.collectives import all_gather
from ..communication.sharding import Cut
from ..strategy import DataParallel
from ..train import Trainer
from ..zero import ShardedOptimizer, ZeRO1
from ..zero.optimizers import rank_marks

_DECIDE_STATE = ("amsgrad", "momentum", "centered")
"""Options without which an optimizer keeps less."""


class Whole(NamedTuple):
    """A whole state.

    Attributes:
        tensors: By their names in a checkpoint, on rank 0's host; empty on the other ranks.
        numbers: The optimizer's state that is no tensor, by ``KEY.NAME``.
        elementwise: Keys of the optimizer's state that has an entry for each element.
    """

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    elementwise: list[str]


class RankState(NamedTuple):
    """What a rank holds of a training state.

    Attributes:
        net: The wrapper, or a module of one process.
        module: What it wraps.
        optimizer: Over parameters, or this rank's shards of them.
        updated: What the optimizer updates of each parameter, by name: itself, ``[shape]``, or a shard, ``[c]``.
        shapes: Of the whole parameters, by name.
        sharded: How the parameters of which the optimizer updates a shard are cut, by name.
    """

    net: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    updated: dict[str, torch.Tensor]
    shapes: dict[str, torch.Size]
    sharded: Mapping[str, Cut]

    @classmethod
    def of(cls, trainer: Trainer) -> RankState:
        """What this rank's trainer holds.

        Raises:
            ValueError: If ranks train apart, state of whole parameters is on single ranks, the optimizer updates other
                parameters than the module's, or keeps what is neither tensor nor number.
        """
        check_kind("trainer", trainer, Trainer, "a torchref.Trainer")
        net: Any = trainer.net
        optimizer: Any = net.optimizer if isinstance(net, ZeRO1) else trainer.optimizer
        is_split = isinstance(optimizer, ShardedOptimizer) or type(optimizer).__name__ == "ZeroRedundancyOptimizer"
        if not isinstance(optimizer, torch.optim.Optimizer) or is_split:
            raise ValueError(f"optimizer (={type(optimizer).__name__}) must be torch's, or that of zero1 or zero2")
        world = num_ranks()
        if isinstance(net, (DataParallel, DistributedDataParallel)):
            module, group_size = net.module, dist.get_world_size(net.process_group)
        else:
            module, group_size = net, 1
        if group_size != world:
            raise ValueError(f"net (={type(net).__name__} on {group_size} ranks) must train on all {world} of the job")
        updated: dict[str, torch.Tensor] = dict(module.named_parameters())
        shapes = {name: parameter.shape for name, parameter in updated.items()}
        shards = net.layout() if isinstance(net, DataParallel) else {}
        shards = {name: one for name, one in shards.items() if name in updated}  # each shared parameter once
        updated |= {name: shard for name, (shard, _) in shards.items()}
        shapes |= {name: torch.Size(cut.shape) for name, (_, cut) in shards.items()}
        known = {id(one) for one in updated.values()}
        if any(id(one) not in known for one in _params_of(optimizer)):
            raise ValueError("optimizer must update parameters of the module alone: others would not be saved")
        for state in optimizer.state.values():
            for key, value in state.items():
                if not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
                    raise ValueError(f"optimizer state {key!r} (={type(value).__name__}) must be a tensor or a number")
        return cls(net, module, optimizer, updated, shapes, {name: cut for name, (_, cut) in shards.items()})

    @torch.no_grad()
    def gather(self) -> Whole:
        """Gathers the whole; call it on every rank."""
        whole: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        elementwise: set[str] = set()

        def keep(name: str, tensor: torch.Tensor) -> None:
            if rank() == 0:
                on_host = tensor.detach().cpu()
                is_part = on_host.untyped_storage().nbytes() > on_host.nbytes  # all of which would be written
                whole[name] = on_host.clone() if is_part else on_host

        for name, parameter in self.module.named_parameters():
            keep(f"params.{name}", self._gather(name, parameter) if self._is_shard(name, parameter) else parameter)
        for name, buffer in self._buffers().items():
            keep(f"buffers.{name}", buffer)
        for name, updated in self.updated.items():
            for key, value in self.optimizer.state.get(updated, {}).items():
                if not isinstance(value, torch.Tensor):
                    numbers[f"{key}.{name}"] = value
                    continue
                if is_shard := name in self.sharded and value.ndim > 0 and value.shape == updated.shape:
                    value = self._gather(name, value)  # noqa: PLW2901
                if is_shard or value.ndim:
                    elementwise.add(key)
                keep(f"state.{key}.{name}", value)
        if not any(self.shapes.values()):  # of numbers alone nothing shows what an optimizer keeps for each
            elementwise |= {key for state in self.optimizer.state.values() for key in state} - {"step"}
        return Whole(whole, numbers, sorted(elementwise))

    def replicated(self) -> dict[str, torch.Tensor]:
        """What every rank holds in full, by the names in a checkpoint."""
        params = dict(self.module.named_parameters())
        found: dict[str, torch.Tensor] = {}
        found |= {f"params.{name}": one for name, one in params.items() if not self._is_shard(name, one)}
        found |= {f"buffers.{name}": one for name, one in self._buffers().items()}
        for name, updated in self.updated.items():
            if name not in self.sharded:
                state = self.optimizer.state.get(updated, {}).items()
                found |= {f"state.{key}.{name}": one for key, one in state if isinstance(one, torch.Tensor)}
        return found

    @property
    def state_has(self) -> dict[str, bool]:
        """Options of the optimizer that decide what it keeps, and whether they are on."""
        return {name: bool(self.optimizer.defaults[name]) for name in _DECIDE_STATE if name in self.optimizer.defaults}

    def check_fits(self, saved: Mapping[str, torch.Tensor], about: Mapping[str, Any], checkpoint: str) -> None:
        """Compares what a checkpoint holds with what is here.

        Raises:
            ValueError: If it is of another model, optimizer or dtype.
        """
        here = {f"params.{name}": (self.updated[name].dtype, tuple(shape)) for name, shape in self.shapes.items()}
        here |= {f"buffers.{name}": (one.dtype, tuple(one.shape)) for name, one in self._buffers().items()}
        there = {name: (one.dtype, tuple(one.shape)) for name, one in saved.items() if not name.startswith("state.")}
        for name in here | there:
            if there.get(name) != here.get(name):
                found = [" ".join(map(str, one[name])) if name in one else "missing" for one in (there, here)]
                raise ValueError(f"{checkpoint} is of another model: {name} is {found[0]} there and {found[1]} here")
        optimizer = type(self.optimizer).__name__
        if _same_state(about["optimizer"]) != _same_state(optimizer):
            raise ValueError(f"{checkpoint} is of another optimizer: {about['optimizer']} there and {optimizer} here")
        if about["state_has"] != self.state_has:
            raise ValueError(
                f"{checkpoint} is of another optimizer: its options are {about['state_has']} there and"
                f" {self.state_has} here"
            )
        known = {id(one) for one in _params_of(self.optimizer)}
        for entry in [*_state_names(saved), *about["numbers"]]:
            key, _, name = entry.partition(".")
            if name not in self.updated or id(self.updated[name]) not in known:
                raise ValueError(f"{checkpoint} has {key} of {name!r}, which the optimizer here does not update")
            if entry in about["numbers"] or name not in self.sharded or key not in about["elementwise"]:
                continue
            if (shape := tuple(saved[f"state.{entry}"].shape)) != tuple(self.shapes[name]):
                raise ValueError(
                    f"{checkpoint} has {key} of {name!r} of shape {shape}, which cannot be sharded as the parameter"
                    f" (={tuple(self.shapes[name])}) is"
                )

    @torch.no_grad()
    def load(self, saved: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Takes this rank's part of a checkpoint that fits."""
        for name, parameter in self.module.named_parameters():
            whole = saved[f"params.{name}"]
            parameter.copy_(self._cut(name, whole) if self._is_shard(name, parameter) else whole)
        for name, buffer in self._buffers().items():
            buffer.copy_(saved[f"buffers.{name}"])

        numbers = {id(one): number for number, one in enumerate(_params_of(self.optimizer))}
        state: dict[int, dict[str, Any]] = {}

        def put(entry: str, value: Any) -> None:
            key, _, name = entry.partition(".")
            state.setdefault(numbers[id(self.updated[name])], {})[key] = value

        for entry, value in about["numbers"].items():
            put(entry, value)
        for entry in _state_names(saved):
            key, _, name = entry.partition(".")
            whole = saved[f"state.{entry}"]
            is_shard = name in self.sharded and key in about["elementwise"]
            # A copy, not the file, which is mapped into memory.
            put(entry, self._cut(name, whole) if is_shard else whole.clone())
        marks = rank_marks(self.net.process_group) if isinstance(self.net, ZeRO1) else {}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state} | marks)
        for number, one in enumerate(_params_of(self.optimizer)):
            for key, value in state.get(number, {}).items():
                loaded = self.optimizer.state[one][key]
                if isinstance(value, torch.Tensor) and loaded.dtype != value.dtype:  # torch gives it the parameter's
                    self.optimizer.state[one][key] = value.to(loaded.device)

    def _is_shard(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the module itself holds a shard, as under zero3."""
        return name in self.sharded and parameter is self.updated[name]

    def _gather(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        rows = all_gather(shard.detach().as_subclass(torch.Tensor).reshape(-1))
        return self.sharded[name].from_rows(rows.view(num_ranks(), -1))

    def _cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return self.sharded[name].local_shard(whole, rank()).clone()

    def _buffers(self) -> dict[str, torch.Tensor]:
        def is_saved(name: str) -> bool:
            owner, _, last = name.rpartition(".")
            return last not in self.module.get_submodule(owner)._non_persistent_buffers_set

        return {name: buffer for name, buffer in self.module.named_buffers() if is_saved(name)}


def rank() -> int:
    """This process's number, 0 outside of a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """The number of ranks, 1 outside of a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_finite(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor may be saved. A mask holds infinities, and so may an optimizer's scalar, as the best loss."""
    if not tensor.is_floating_point() or (tensor.ndim == 0 and not name.startswith("params.")):
        return True
    return not bool((tensor.isnan() if name.startswith("buffers.") else ~tensor.isfinite()).any())


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, numbered as its ``state_dict`` does."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def _same_state(optimizer: str) -> str:
    """The name of the optimizer whose state one keeps."""
    return "Adam" if optimizer == "AdamW" else optimizer


def _state_names(saved: Mapping[str, torch.Tensor]) -> list[str]:
    """``KEY.NAME`` of the optimizer's tensors."""
    return [name.removeprefix("state.") for name in saved if name.startswith("state.")]
