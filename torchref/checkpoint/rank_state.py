"""What a rank holds of a training state, and the whole of it that a checkpoint holds.

===================== ======================== ==================================================
in the checkpoint     shape                    is
===================== ======================== ==================================================
``params.NAME``       ``[shape]``              a parameter, frozen ones included
``buffers.NAME``      ``[shape]``              a buffer of the ``state_dict``, such as a running mean
``state.KEY.NAME``    ``[shape]``, or another  the optimizer's state of it, such as ``exp_avg``
===================== ======================== ==================================================

Shards are gathered tensor by tensor, and cut again from the whole when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..communication.sharding import Cut, gather_whole
from ..strategy import DataParallel
from ..train import Trainer
from ..zero import ShardedOptimizer

_NUMBERS = ("step", "eta", "mu", "mu_product")  # state of torch's optimizers that is not cut, also of a scalar
_DECIDE_STATE = ("amsgrad", "momentum", "centered")  # options without which an optimizer keeps less


class RankState(NamedTuple):
    """What a rank holds of a training state."""

    module: nn.Module  # what is trained, without a wrapper
    optimizer: torch.optim.Optimizer  # over parameters, or this rank's shards of them
    updated: dict[str, torch.Tensor]  # what the optimizer updates of each parameter, by name: itself, or a shard
    cuts: Mapping[str, Cut]  # how the parameters of which the optimizer updates a shard are cut, by name

    @classmethod
    def of(cls, trainer: Trainer) -> RankState:
        """What this rank's trainer holds.

        Refused is one whose ranks train apart, with state of whole parameters on single ranks, or with an optimizer
        that updates other parameters than the module's, or keeps what is neither tensor nor number.
        """
        net: Any = trainer.net
        optimizer: Any = trainer.optimizer.optimizer if trainer.optimizer is net else trainer.optimizer
        if isinstance(optimizer, ShardedOptimizer) or type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(f"optimizer (={type(optimizer).__name__}) must not keep a rank's state on that rank")
        if trainer.num_ranks != num_ranks():
            raise ValueError(
                f"net (={type(net).__name__} on {trainer.num_ranks} ranks) must train on all {num_ranks()} of the job"
            )
        is_parallel = isinstance(net, DataParallel)
        module = net.module if is_parallel else net
        updated: dict[str, torch.Tensor] = dict(module.named_parameters())
        shards = net.layout() if is_parallel else {}
        cuts = {name: cut for name, (_, cut) in shards.items() if name in updated}  # each shared parameter once
        updated |= {name: shards[name][0] for name in cuts}
        known = {id(one) for one in updated.values()}
        if any(id(one) not in known for one in _params_of(optimizer)):
            raise ValueError("optimizer must update parameters of the module alone: others would not be saved")
        for state in optimizer.state.values():
            for key, value in state.items():
                if not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
                    raise ValueError(f"optimizer state {key!r} (={type(value).__name__}) must be a tensor or a number")
        return cls(module, optimizer, updated, cuts)

    def held(self) -> dict[str, tuple[Any, Cut | None]]:
        """Tensors and numbers by their names in a checkpoint, and how those are cut that are shards."""
        found: dict[str, tuple[Any, Cut | None]] = {}
        for name, parameter in self.module.named_parameters():
            found[f"params.{name}"] = parameter, self.cuts.get(name) if parameter is self.updated[name] else None
        for name, buffer in self.module.named_buffers():
            owner, _, last = name.rpartition(".")
            if last not in self.module.get_submodule(owner)._non_persistent_buffers_set:
                found[f"buffers.{name}"] = buffer, None
        for name, updated in self.updated.items():
            for key, value in self.optimizer.state.get(updated, {}).items():
                is_shard = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == updated.shape
                found[f"state.{key}.{name}"] = value, self.cuts.get(name) if is_shard else None
        return found

    @torch.no_grad()
    def gather(self) -> dict[str, Any]:
        """Gathers the whole onto rank 0's host; call it on every rank. The other ranks get nothing."""
        whole: dict[str, Any] = {}
        for name, (one, cut) in self.held().items():
            if cut is not None:
                one = gather_whole(one, cut)  # noqa: PLW2901
            if rank() == 0:  # copied, or all of a storage would be written, and plain, or it would not be read
                is_tensor = isinstance(one, torch.Tensor)
                whole[name] = one.detach().cpu().clone().as_subclass(torch.Tensor) if is_tensor else one
        return whole

    @property
    def about(self) -> dict[str, Any]:
        """What has to fit: the optimizer, and whether options are on that decide what it keeps."""
        options = self.optimizer.defaults
        return {
            "optimizer": type(self.optimizer).__name__,
            "state_has": {name: bool(options[name]) for name in _DECIDE_STATE if name in options},
        }

    def check_fits(self, saved: Mapping[str, Any], about: Mapping[str, Any], checkpoint: str) -> None:
        """Refuses a checkpoint of another model, optimizer or dtype, by a ValueError."""
        held = {name: item for name, item in self.held().items() if not name.startswith("state.")}
        here = {name: (one.dtype, tuple(cut.shape if cut else one.shape)) for name, (one, cut) in held.items()}
        there = {name: (one.dtype, tuple(one.shape)) for name, one in saved.items() if not name.startswith("state.")}
        for name in here | there:
            if there.get(name) != here.get(name):
                found = [" ".join(map(str, one[name])) if name in one else "missing" for one in (there, here)]
                raise ValueError(f"{checkpoint} is of another model: {name} is {found[0]} there and {found[1]} here")
        alike = ({"Adam", "AdamW"}, {about["optimizer"], self.about["optimizer"]})  # these two keep the same
        for key in ("optimizer", "state_has") if alike[0] != alike[1] else ("state_has",):
            if about[key] != self.about[key]:
                raise ValueError(f"{checkpoint} is of another optimizer: {about[key]} there and {self.about[key]} here")
        known = {id(one) for one in _params_of(self.optimizer)}
        for _, key, name in (entry.split(".", 2) for entry in saved if entry.startswith("state.")):
            one = self.updated.get(name)
            if one is None or (one.requires_grad and id(one) not in known):  # ZeRO's optimizers know no frozen ones
                raise ValueError(f"{checkpoint} has {key} of {name!r}, which the optimizer here does not update")

    @torch.no_grad()
    def load(self, saved: Iterable[tuple[str, Any]]) -> None:
        """Takes this rank's part of each tensor of a checkpoint that fits, by name, one after another."""
        held, params = self.held(), _params_of(self.optimizer)
        numbers = {id(one): number for number, one in enumerate(params)}
        state: dict[int, dict[str, Any]] = {}
        for entry, value in saved:
            if not entry.startswith("state."):
                one, cut = held[entry]
                one.copy_(cut.local_shard(value, rank()) if cut else value)
                continue
            _, key, name = entry.split(".", 2)
            if isinstance(value, torch.Tensor):
                if (cut := self.cuts.get(name)) and cut.shape == value.shape and key not in _NUMBERS:
                    value = cut.local_shard(value, rank())  # noqa: PLW2901
                value = value.clone()  # noqa: PLW2901  # not the file, which is mapped into memory
            if (number := numbers.get(id(self.updated[name]))) is not None:
                state.setdefault(number, {})[key] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        for number, values in state.items():
            loaded = self.optimizer.state[params[number]]
            for key, value in values.items():
                if isinstance(value, torch.Tensor):  # torch gives it the parameter's dtype
                    loaded[key] = value.to(loaded[key].device)


def rank() -> int:
    """This process's number, 0 outside of a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """The number of ranks, 1 outside of a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, numbered as its ``state_dict`` does."""
    return [one for group in optimizer.param_groups for one in group["params"]]
