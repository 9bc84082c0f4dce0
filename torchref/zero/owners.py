"""Optimizer state sharded by whole parameters: one rank owns, updates and then broadcasts each of them.

The simplest reading of ZeRO stage 1: the gradients are already averaged by a strategy in ``ddp.py``. It sends 1.5 times
as much as ``ZeRO1``, and balances the ranks only as well as whole parameters allow.

    p = optimizer(g, state[r], p)      of parameters that rank r owns
    p = broadcast from its owner       of every parameter

    calls per step: P (parameters), beside the gradients'; the first step also checks that all ranks list the same ones
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from jaxddp.communication.buckets import assign_owners

from ..agreement import check_alike
from ..communication.collectives import broadcast
from .optimizers import as_groups, copy_options, describe_optimizer, group_options, mark_state_dicts


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer, with its state sharded over the ranks.

    Every rank uses it like the optimizer itself: ``param_groups`` lists all parameters, and options changed there, as
    by a learning-rate schedule, apply from the next step on. ``state`` is this rank's, of ``local``.
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
            params: As torch's optimizers take them: parameters, or groups of them; in the same order on every rank.
            optimizer_cls: Makes the optimizer of one rank's parameters; must update parameters one by one, and step
                without a closure.
            process_group: The ranks; all of them when None.
            **kwargs: For ``optimizer_cls``.
        """
        self.process_group = process_group
        self.rank, self.num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.owner: dict[torch.Tensor, int] = {}  # the rank of each parameter
        super().__init__(as_groups(params), kwargs)
        self.local = optimizer_cls([self._local_group(group) for group in self.param_groups], **kwargs)
        mark_state_dicts(self.local, process_group)
        self.defaults, self.state = self.local.defaults, self.local.state
        copy_options(self.local, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and assigns its parameters so that ranks own about equally many trainable bytes."""
        super().add_param_group(as_groups([param_group])[0])
        added = self.param_groups[-1]
        loads: list[tuple[int, ...]] = [(0, 0)] * self.num_ranks
        for parameter, rank in self.owner.items():
            loads[rank] = tuple(map(sum, zip(loads[rank], _cost(parameter), strict=True)))
        owners = assign_owners([_cost(one) for one in added["params"]], loads)
        self.owner.update(zip(added["params"], owners, strict=True))
        self._agreed = False
        if hasattr(self, "local"):
            self.local.add_param_group(self._local_group(added))
            # Of this group only: the options of the others may have been changed in param_groups.
            added.update(group_options(self.local.param_groups[-1]))

    @torch._disable_dynamo  # its collectives are not for a compiler
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters, then broadcasts every parameter from its owner.

        The closure recomputes the gradients and returns the loss, which is returned. Raises a ValueError if ranks
        differ in parameters, the optimizer's class or its options.
        """
        copy_options(self, self.local)
        if not self._agreed:  # one parameter would be broadcast into another
            owners = enumerate(self.owner.items())
            alike = {f"parameter {i}": f"{[*p.shape]} {p.dtype} of rank {owner}" for i, (p, owner) in owners}
            names = {f"names of group {i}": one.get("param_names") for i, one in enumerate(self.param_groups)}
            check_alike(alike | names | describe_optimizer(self.local), self.process_group)
            self._agreed = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.local.step()
        # One that was frozen is updated all the same while it has a gradient.
        updated = [one for one in self.owner if one.requires_grad or one.grad is not None] if self.num_ranks > 1 else []
        works: list[Any] = [broadcast(one, self.owner[one], self.process_group, async_op=True) for one in updated]
        for work in works:
            work.wait()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, marked with its rank; every rank must save its own."""
        copy_options(self, self.local)
        for parameter in [one for one, held in self.state.items() if not held]:  # made by a look at another rank's
            del self.state[parameter]
        return self.local.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict``; a ValueError if it is another rank's, or of another number of ranks."""
        self.local.load_state_dict(state_dict)
        copy_options(self.local, self)
        self.state = self.local.state

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        owned = [parameter for parameter in group["params"] if self.owner[parameter] == self.rank]
        return {**group_options(group), "params": owned}


def _cost(parameter: torch.Tensor) -> tuple[int, ...]:
    """Trainable bytes, and bytes: a frozen parameter has no state until it is trained."""
    return parameter.nbytes * parameter.requires_grad, parameter.nbytes
