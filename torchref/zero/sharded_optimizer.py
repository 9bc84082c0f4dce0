"""Sharded optimizer state by whole parameters: each is owned, updated and then broadcast by one rank.

ZeRO's first stage in its simplest reading, over gradients that somebody else has summed, such as any strategy of
``ddp/``: nothing changes but the optimizer, and any that updates parameters one by one will do. Against ``ZeRO1`` it
sends half as much again, and its shards are as even as whole parameters can be dealt out.

    ========= ====================== ========================================================
    tensor    on each rank           bytes on each rank, AdamW, fp32
    ========= ====================== ========================================================
    parameter ``[shape]``            4 Psi
    gradient  ``[shape]``, summed    4 Psi
    moments   of own parameters only 8 Psi / N, at most those of the largest parameter more
    ========= ====================== ========================================================

    p = optimizer(g, state[r], p)      of parameters that rank r owns
    p = broadcast from its owner       of every parameter

    calls per step: P (parameters), beside the gradients'; at the first one more, whether ranks list the same ones
    bytes sent per rank: parameter bytes, beside 2 (N-1)/N times that for the gradients

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.1).
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..communication.collectives import broadcast
from .groups import as_groups, as_list
from .own_state import check_own, whose


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer, its state spread over the ranks.

    Used like the optimizer itself, by every rank alike: all parameters are in ``param_groups`` everywhere, and options
    changed there, by a learning-rate schedule for one, hold from the next step on. ``state`` is this rank's.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        """Deals the parameters out to the ranks.

        Args:
            params: As torch's optimizers take them: parameters, or groups of them with options; on every rank the same
                ones in the same order.
            optimizer_cls: Makes the optimizer of one rank's parameters; it must treat parameters one by one.
            process_group: The ranks; all of them when None.
            **kwargs: For ``optimizer_cls``.

        Raises:
            TypeError: If parameters are in a set, which has no order, or as ``optimizer_cls``.
            ValueError: If there is no process group yet, its steps need a closure, or as ``optimizer_cls``.
        """
        if not dist.is_initialized():
            raise ValueError("ShardedOptimizer needs a process group: call torch.distributed.init_process_group first")
        self.process_group = process_group
        self.rank, self.num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._owner: dict[torch.Tensor, int] = {}
        self._trained_bytes, self._all_bytes = [0] * self.num_ranks, [0] * self.num_ranks
        self._agreed = self.num_ranks == 1
        self._local: torch.optim.Optimizer | None = None
        super().__init__(as_groups(params), kwargs)
        self._local = optimizer_cls([self._own_group(group) for group in self.param_groups], **kwargs)
        _check_step(self._local)
        self.defaults = self._local.defaults
        self._take_options()
        self.state = self._local.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; parameters in it are dealt out so that ranks own about equally many bytes.

        Frozen ones have no state until they are trained: they even out all that a rank owns, the others what of it is
        trained now.

        Args:
            param_group: ``"params"`` and options.

        Raises:
            TypeError: If parameters are in a set, or as torch's optimizers.
            ValueError: As torch's optimizers.
        """
        super().add_param_group({**param_group, "params": as_list(param_group["params"])})
        added = self.param_groups[-1]
        for parameter in sorted(added["params"], key=lambda one: (one.requires_grad, one.nbytes), reverse=True):
            self._deal(parameter)
        self._agreed = self.num_ranks == 1
        if self._local is not None:
            self._local.add_param_group(self._own_group(added))
            added.update(_options(self._local.param_groups[-1]))  # of this group alone: others may have changed here

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the own parameters, then gives every rank all of them.

        Args:
            closure: Computes gradients anew and returns the loss; called once, on every rank.

        Returns:
            What the closure returned; None without one.

        Raises:
            ValueError: If a group was added, and not the same one on every rank.
        """
        if not self._agreed:
            self._check_agreement()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._give_options()
        self.local.step()
        if self.num_ranks > 1:
            works = [
                broadcast(parameter, root=owner, group=self.process_group, async_op=True)
                for parameter, owner in self._owner.items()
                if parameter.requires_grad
            ]
            for work in works:
                if work is not None:
                    work.wait()
        return loss

    @property
    def local(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters."""
        assert self._local is not None
        return self._local

    def owner(self, parameter: torch.Tensor) -> int:
        """Gives the rank that owns a parameter."""
        return self._owner[parameter]

    def state_dict(self) -> dict[str, Any]:
        """Gives this rank's part of the state, with ``"rank"`` and ``"num_ranks"``; every rank must keep its own."""
        self._give_options()
        return {**whose(self.process_group), **self.local.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` gave, on the same rank of as many.

        Args:
            state_dict: This rank's part.

        Raises:
            ValueError: If it is another rank's, of another number of ranks, or as torch's optimizers.
        """
        check_own(state_dict, self.process_group)
        self.local.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._take_options()
        self.state = self.local.state

    def __getstate__(self) -> dict[str, Any]:
        """Gives what a copy needs: torch's own, and who owns what."""
        names = ("process_group", "rank", "num_ranks", "_owner", "_trained_bytes", "_all_bytes", "_agreed", "_local")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOptimizer:
        """Copies the optimizer with its parameters, or for those of a module that is copied along with it."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def _deal(self, parameter: torch.Tensor) -> None:
        loads: Sequence[Any] = self._all_bytes
        if parameter.requires_grad:
            loads = list(zip(self._trained_bytes, self._all_bytes, strict=True))
        owner = min(range(self.num_ranks), key=loads.__getitem__)
        self._owner[parameter] = owner
        self._all_bytes[owner] += parameter.nbytes
        self._trained_bytes[owner] += parameter.nbytes if parameter.requires_grad else 0

    def _check_agreement(self) -> None:
        """Ranks that do not list the same parameters would broadcast one into another."""
        names = [group.get("param_names") for group in self.param_groups]
        owned = [(tuple(p.shape), str(p.dtype), owner) for p, owner in self._owner.items()]
        digest = zlib.crc32(repr((names, owned)).encode())
        device = next(iter(self._owner), torch.empty(0)).device
        largest = torch.tensor([digest, -digest], device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.process_group)  # not counted with the parameters
        if largest.sum() != 0:
            raise ValueError("params must be the same on every rank, in the same order: names, shapes or dtypes differ")
        self._agreed = True

    def _own_group(self, group: dict[str, Any]) -> dict[str, Any]:
        own = [parameter for parameter in group["params"] if self._owner[parameter] == self.rank]
        return {**_options(group), "params": own}

    def _give_options(self) -> None:
        for mine, theirs in zip(self.param_groups, self.local.param_groups, strict=True):
            theirs.update(_options(mine))

    def _take_options(self) -> None:
        for mine, theirs in zip(self.param_groups, self.local.param_groups, strict=True):
            mine.update(_options(theirs))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise ValueError(
            f"optimizer (={type(optimizer).__name__}) must step without a closure: each rank would call it another"
            " number of times"
        ) from error
