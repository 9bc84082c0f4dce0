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

    calls per step: P (parameters), beside the gradients'
    bytes sent per rank: parameter bytes, beside 2 (N-1)/N times that for the gradients

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import broadcast


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
            params: As torch's optimizers take them: parameters, or groups of them with options.
            optimizer_cls: Makes the optimizer of one rank's parameters; it must treat parameters one by one.
            process_group: The ranks; all of them when None.
            **kwargs: For ``optimizer_cls``.

        Raises:
            ValueError: If there is no process group yet, or as ``optimizer_cls``.
        """
        if not dist.is_initialized():
            raise ValueError("ShardedOptimizer needs a process group: call torch.distributed.init_process_group first")
        self.process_group = process_group
        self.rank, self.num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._owner: dict[torch.Tensor, int] = {}
        self._load_bytes = [0] * self.num_ranks
        self._local: torch.optim.Optimizer | None = None
        super().__init__(params, kwargs)
        self._local = optimizer_cls([self._own_group(group) for group in self.param_groups], **kwargs)
        self.defaults = self._local.defaults
        self._take_options()
        self.state = self._local.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; parameters in it are dealt out so that ranks own about equally many bytes.

        Args:
            param_group: ``"params"`` and options.

        Raises:
            ValueError: As torch's optimizers.
        """
        listed = param_group["params"]
        listed = [listed] if isinstance(listed, torch.Tensor) else list(listed)
        once = {id(one[1] if isinstance(one, tuple) else one): one for one in listed}  # tied ones are listed twice
        super().add_param_group({**param_group, "params": list(once.values())})
        added = self.param_groups[-1]
        for parameter in sorted(added["params"], key=_num_bytes, reverse=True):
            owner = min(range(self.num_ranks), key=self._load_bytes.__getitem__)
            self._owner[parameter] = owner
            self._load_bytes[owner] += _num_bytes(parameter)
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
        """
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
        return {"rank": self.rank, "num_ranks": self.num_ranks, **self.local.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` gave, on the same rank of as many.

        Args:
            state_dict: This rank's part.

        Raises:
            ValueError: If it is another rank's, of another number of ranks, or as torch's optimizers.
        """
        found = (state_dict.get("rank"), state_dict.get("num_ranks"))
        if found != (self.rank, self.num_ranks):
            raise ValueError(
                f"state_dict (=of rank {found[0]} of {found[1]}) must be this rank's"
                f" (={self.rank} of {self.num_ranks}): shards do not move between ranks"
            )
        self.local.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._take_options()
        self.state = self.local.state

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


def _num_bytes(parameter: torch.Tensor) -> int:
    return parameter.nbytes if parameter.requires_grad else 0  # a frozen one has no state
