"""Optimizer state sharded by whole parameters: one rank owns, updates and then broadcasts each of them.

The simplest reading of ZeRO stage 1. The gradients are already averaged by a strategy in ``ddp/``; only the optimizer
changes, and any that updates parameters one by one will do. It sends 1.5 times as much as ``ZeRO1``, and balances the
ranks only as well as whole parameters allow.

    ========= ====================== ========================================================
    tensor    on each rank           bytes on each rank, AdamW, fp32
    ========= ====================== ========================================================
    parameter ``[shape]``            4 Psi
    gradient  ``[shape]``, averaged  4 Psi
    moments   of owned parameters    8 Psi / N, plus at most those of the largest parameter
    ========= ====================== ========================================================

    p = optimizer(g, state[r], p)      of parameters that rank r owns
    p = broadcast from its owner       of every parameter

    calls per step: P (parameters), beside the gradients'; the first step also checks that all ranks list the same ones
    bytes sent per rank: parameter bytes, beside 2 (N-1)/N times that for the gradients

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.1).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from jaxddp.arguments import check_function, check_kind
from jaxddp.communication.owners import assign_owners

from ..agreement import check_alike
from ..communication.collectives import broadcast
from .optimizers import (
    as_groups,
    as_list,
    check_group,
    check_marks,
    copy_options,
    describe_optimizer,
    group_options,
    make_optimizer,
    rank_marks,
)


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer, with its state sharded over the ranks.

    Every rank uses it like the optimizer itself: ``param_groups`` lists all parameters, and options changed there, for
    example by a learning-rate schedule, apply from the next step on. ``state`` is this rank's.
    """

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
            optimizer_cls: Makes the optimizer of one rank's parameters; must update parameters one by one.
            process_group: The ranks; all of them when None.
            **kwargs: For ``optimizer_cls``.

        Raises:
            TypeError: If parameters are in a set, which has no order, or are no tensors.
            ValueError: If there is no process group yet, the optimizer's step needs a closure, it does not take the
                options, or as ``optimizer_cls``.
        """
        if not dist.is_initialized():
            raise ValueError("ShardedOptimizer needs a process group: call torch.distributed.init_process_group first")
        if process_group is not None:
            check_kind("process_group", process_group, dist.ProcessGroup, "a process group, or None for all ranks")
        self.process_group = process_group
        self.rank, self.num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._owner: dict[torch.Tensor, int] = {}
        self._trained_bytes, self._all_bytes = [0] * self.num_ranks, [0] * self.num_ranks
        self._agreed = self.num_ranks == 1
        self._local: torch.optim.Optimizer | None = None
        super().__init__(as_groups(params), kwargs)
        self._local = make_optimizer(optimizer_cls, [self._local_group(group) for group in self.param_groups], kwargs)
        _check_step(self._local)
        self.defaults = self._local.defaults
        copy_options(self.local, self)
        self.state = self._local.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and assigns its parameters so that ranks own about equally many bytes.

        Trainable parameters balance the trainable bytes. Frozen ones, which have no state until they are trained,
        balance all bytes.

        Raises:
            TypeError: If parameters are in a set, or as torch's optimizers.
            ValueError: As torch's optimizers.
        """
        check_group(param_group)
        super().add_param_group({**param_group, "params": as_list(param_group["params"])})
        added = self.param_groups[-1]
        for is_trained in (True, False):
            self._assign([one for one in added["params"] if one.requires_grad == is_trained], is_trained)
        self._agreed = self.num_ranks == 1
        if self._local is not None:
            self._local.add_param_group(self._local_group(added))
            # Of this group only: the options of the others may have been changed in param_groups.
            added.update(group_options(self._local.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters, then broadcasts every parameter from its owner.

        The closure recomputes the gradients and returns the loss, which is returned; it is called once on every rank.

        Raises:
            ValueError: If the ranks list different parameters, or differ in the optimizer's class or options,.
        """
        if not self._agreed:
            self._check_agreement()
        loss = None
        if closure is not None:
            check_function("closure", closure)
            with torch.enable_grad():
                loss = closure()
        copy_options(self, self.local)
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
        """The rank that owns a parameter."""
        return self._owner[parameter]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, marked with ``"rank"`` and ``"num_ranks"``; every rank must save its own."""
        copy_options(self, self.local)
        return {**rank_marks(self.process_group), **self.local.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict`` of the same rank and number of ranks.

        Raises:
            ValueError: If it is another rank's, of another number of ranks, or as torch's optimizers.
        """
        check_marks(state_dict, self.process_group)
        self.local.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        copy_options(self.local, self)
        self.state = self.local.state

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a ShardedOptimizer holds a process group, so it is not pickled or copied: save state_dict()"
        )

    def _assign(self, parameters: list[torch.Tensor], are_trained: bool) -> None:
        held = (self._trained_bytes, self._all_bytes) if are_trained else (self._all_bytes,)
        costs = [(one.nbytes,) * len(held) for one in parameters]
        owners = assign_owners(costs, list(zip(*held, strict=True)))
        for parameter, owner in zip(parameters, owners, strict=True):
            self._owner[parameter] = owner
            for of_ranks in held:
                of_ranks[owner] += parameter.nbytes

    def _check_agreement(self) -> None:
        """Ranks that list different parameters would broadcast one into another."""
        copy_options(self, self.local)
        names = {f"names of group {i}": group.get("param_names") for i, group in enumerate(self.param_groups)}
        owned = {
            f"parameter {i}": f"{[*p.shape]} {p.dtype} of rank {owner}"
            for i, (p, owner) in enumerate(self._owner.items())
        }
        check_alike(names | owned | describe_optimizer(self.local), self.process_group)
        self._agreed = True

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        owned = [parameter for parameter in group["params"] if self._owner[parameter] == self.rank]
        return {**group_options(group), "params": owned}


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise ValueError(
            f"optimizer (={type(optimizer).__name__}) must step without a closure: each rank would call it another"
            " number of times"
        ) from error
