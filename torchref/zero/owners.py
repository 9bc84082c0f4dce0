"""Optimizer state sharded by whole parameters: one rank owns, updates and then broadcasts each of them.

The simplest reading of ZeRO stage 1. The gradients are already averaged by a strategy in ``ddp/``; only the optimizer
changes, and any that updates parameters one by one will do. It sends 1.5 times as much as ``ZeRO1``, and balances the
ranks only as well as whole parameters allow.

    p = optimizer(g, state[r], p)      of parameters that rank r owns
    p = broadcast from its owner       of every parameter

    calls per step: P (parameters), beside the gradients'; the first step also checks that all ranks list the same ones
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from jaxddp.communication.owners import assign_owners

from ..agreement import check_alike
from ..communication.collectives import broadcast
from . import optimizers
from .optimizers import copy_options


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer, with its state sharded over the ranks.

    Every rank uses it like the optimizer itself: ``param_groups`` lists all parameters, and options changed there, for
    example by a learning-rate schedule, apply from the next step on. ``state`` is this rank's.

    Attributes:
        local: The optimizer of this rank's parameters.
    """

    local: torch.optim.Optimizer

    def __init__(
        self,
        params: Any,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        """Assigns the parameters to ranks.

        Args:
            params: As torch's optimizers take them: parameters, or groups of them with options; the same on every rank,
                in the same order.
            optimizer_cls: Makes the optimizer of one rank's parameters; must update parameters one by one, and step
                without a closure.
            process_group: The ranks; all of them when None.
            **kwargs: For ``optimizer_cls``.

        Raises:
            TypeError: If parameters are in a set, which has no order.
        """
        self.process_group = process_group
        self.rank, self.num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._owner: dict[torch.Tensor, int] = {}
        super().__init__(optimizers.as_groups(params), kwargs)
        self.local = optimizer_cls([self._local_group(group) for group in self.param_groups], **kwargs)
        self.defaults, self.state = self.local.defaults, self.local.state
        copy_options(self.local, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and assigns its parameters so that ranks own about equally many bytes.

        Trainable parameters balance the trainable bytes. Frozen ones, which have no state until they are trained,
        balance all bytes. Raises as torch's optimizers, and a TypeError if parameters are in a set.
        """
        super().add_param_group({**param_group, "params": optimizers.as_list(param_group["params"])})
        added = self.param_groups[-1]
        for is_trained in (True, False):
            held = [(self._bytes(rank, trained=True), self._bytes(rank)) for rank in range(self.num_ranks)]
            parameters = [one for one in added["params"] if one.requires_grad == is_trained]
            start = 0 if is_trained else 1
            costs = [(one.nbytes,) * (2 - start) for one in parameters]
            self._owner.update(zip(parameters, assign_owners(costs, [one[start:] for one in held]), strict=True))
        self._agreed = self.num_ranks == 1
        if hasattr(self, "local"):
            self.local.add_param_group(self._local_group(added))
            # Of this group only: the options of the others may have been changed in param_groups.
            added.update(optimizers.group_options(self.local.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters, then broadcasts every parameter from its owner.

        The closure recomputes the gradients and returns the loss, which is returned; it is called once on every rank.

        Raises:
            ValueError: If the ranks list different parameters, or differ in the optimizer's class or options.
        """
        copy_options(self, self.local)
        if not self._agreed:  # one parameter would be broadcast into another
            owners = enumerate(self._owner.items())
            alike: dict[str, Any] = {
                f"parameter {i}": f"{[*p.shape]} {p.dtype} of rank {owner}" for i, (p, owner) in owners
            }
            alike |= {f"names of group {i}": one.get("param_names") for i, one in enumerate(self.param_groups)}
            check_alike(alike | optimizers.describe_optimizer(self.local), self.process_group)
            self._agreed = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.local.step()
        trained = {one: owner for one, owner in self._owner.items() if one.requires_grad and self.num_ranks > 1}
        works = [broadcast(one, owner, self.process_group, async_op=True) for one, owner in trained.items()]
        for work in works:
            if work is not None:
                work.wait()
        return loss

    def owner(self, parameter: torch.Tensor) -> int:
        """The rank that owns a parameter."""
        return self._owner[parameter]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, marked with ``"rank"`` and ``"num_ranks"``; every rank must save its own."""
        copy_options(self, self.local)
        return {**optimizers.rank_marks(self.process_group), **self.local.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict`` of the same rank and number of ranks.

        Raises:
            ValueError: If it is another rank's, of another number of ranks, or as torch's optimizers.
        """
        optimizers.check_marks(state_dict, self.process_group)
        self.local.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        copy_options(self.local, self)
        self.state = self.local.state

    def _bytes(self, rank: int, trained: bool = False) -> int:
        """Bytes of the parameters of a rank."""
        return sum(p.nbytes for p, owner in self._owner.items() if owner == rank and (p.requires_grad or not trained))

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        owned = [parameter for parameter in group["params"] if self._owner[parameter] == self.rank]
        return {**optimizers.group_options(group), "params": owned}
