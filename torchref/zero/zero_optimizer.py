"""``ZeRO1`` and ``ZeRO2`` as a torch optimizer: what a script or a framework that takes one needs.

    net = ZeRO1(module, torch.optim.AdamW, lr=1e-3, sync="backward");  optimizer = ZeROOptimizer(net)
    state_dict        whole state = all-gather of state[r], tensor by tensor        what one process would save
    load_state_dict   state[r]    = chunk r of the whole state                      no communication

So a checkpoint is independent of the number of ranks, and is that of ``torch.optim`` on one process, both ways.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jaxddp.arguments import check_function, check_kind, check_mapping

from ..communication.collectives import all_gather
from ..communication.sharding import local_shard
from .optimizers import copy_options, group_options, rank_marks
from .stage1 import ZeRO1


class ZeROOptimizer(torch.optim.Optimizer):
    """The optimizer of a ``ZeRO1`` or ``ZeRO2``, over the module's parameters.

    Learning-rate schedules drive it, not ``net.optimizer``: its options replace those. ``param_groups`` are the ones
    that the wrapper was given as ``params``, frozen parameters included; else all parameters of the module. After the
    synchronisation gradients are in shards, so what looks at them, as a ``torch.amp.GradScaler`` does, is refused; clip
    with ``clip_grad_norm_`` of the wrapper. ``state`` stays empty: see ``state_dict``.

    Attributes:
        net: The wrapper.
    """

    def __init__(self, net: ZeRO1) -> None:
        """Lists the parameters, with the options that the wrapper was given.

        Raises:
            ValueError: If ``net`` is no ``ZeRO1`` or ``ZeRO2``.
        """
        if not isinstance(net, ZeRO1):
            raise ValueError(
                f"net (={type(net).__name__}) must be a ZeRO1 or ZeRO2: the others take torch's optimizers"
            )
        self.net = net
        options = [group_options(group) for group in net.optimizer.param_groups]
        groups = [{**one, "params": params} for one, params in zip(options, net.params_of_groups, strict=True)]
        super().__init__(groups, net.optimizer.defaults)
        self._given = options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses groups: the wrapper has planned its communication.

        Raises:
            ValueError: Always, after the constructor.
        """
        if len(self.param_groups) == len(self.net.params_of_groups):
            raise ValueError("a parameter group cannot be added after wrapping: give it to the wrapper, in params")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the wrapper.

        The closure computes gradients, synchronises them, and returns the loss, which is returned.

        Raises:
            RuntimeError: If options of ``net.optimizer`` were changed, or as ``step`` of the wrapper.
            ValueError: As ``step`` of the wrapper.
        """
        loss = None
        if closure is not None:
            check_function("closure", closure)
            with torch.enable_grad():
                loss = closure()
        if [group_options(group) for group in self.net.optimizer.param_groups] != self._given:
            raise RuntimeError(
                "options of net.optimizer were changed, which those of its ZeROOptimizer replace: change those instead"
            )
        self._give_options()
        self.net.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients; see ``zero_grad`` of the wrapper."""
        self.net.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Gathers the state; call it on every rank.

        Returns:
            That of the same optimizer on one process, with tensors on the CPU, on every rank.
        """
        names = self._names()
        state = {}
        for number, name in enumerate(names):
            of_shard = self.net.optimizer.state.get(self.net._shards[name]) if name else None
            if of_shard is not None:
                state[number] = {key: self._gather(name, value) for key, value in of_shard.items()}
        numbers = iter(range(len(names)))
        groups = [
            {**group_options(group), "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned on any number of ranks, or torch's optimizer on one process.

        Call it on every rank; one that loads alone is refused at its next step.

        Raises:
            ValueError: If its groups or shapes are not those of this optimizer.
        """
        check_mapping("state_dict", state_dict, "what state_dict() gave")
        for key, kind in (("state", Mapping), ("param_groups", list)):
            check_kind(f"state_dict[{key!r}]", state_dict.get(key), kind, f"a {kind.__name__}")
        found, expected = (
            [len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], self.param_groups)
        )
        if found != expected:
            raise ValueError(f"state_dict (=groups of {found} parameters) must have groups of {expected}")
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        names = dict(zip(numbers, self._names(), strict=True))
        whole = {names[number]: state for number, state in state_dict["state"].items() if names.get(number)}
        sharded = self._sharded_keys(whole)
        new_numbers = {name: index for index, name in enumerate(name for name in names.values() if name)}
        state = {
            new_numbers[name]: {
                key: self._cut(name, key, value) if key in sharded else copy.deepcopy(value)
                for key, value in of_parameter.items()
            }
            for name, of_parameter in whole.items()
        }
        groups = [
            {**group_options(group), "params": [new_numbers[names[one]] for one in group["params"] if names[one]]}
            for group in state_dict["param_groups"]
        ]
        marks = rank_marks(self.net.process_group)
        self.net.optimizer.load_state_dict({"state": state, "param_groups": groups, **marks})
        copy_options(self.net.optimizer, self)
        self._give_options()

    def _give_options(self) -> None:
        copy_options(self, self.net.optimizer)
        self._given = [group_options(group) for group in self.param_groups]

    def _names(self) -> list[str]:
        """Names of the parameters in the order of the groups; empty for frozen ones, which have no state."""
        names = {id(parameter): name for name, parameter in self.net._trained.items()}
        return [names.get(id(parameter), "") for group in self.param_groups for parameter in group["params"]]

    def _gather(self, name: str, value: Any) -> Any:
        parameter, shard = self.net._trained[name], self.net._shards[name]
        if not isinstance(value, torch.Tensor) or value.shape != shard.shape:
            return value.cpu().clone() if isinstance(value, torch.Tensor) else value
        whole = torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False)
        if whole.numel():
            gathered = all_gather(value, self.net.process_group)
            whole.copy_(gathered[: whole.numel()].view(whole.shape))
        return whole

    def _sharded_keys(self, whole: dict[str, dict[str, Any]]) -> set[str]:
        """Keys of state that has an entry for each element: a scalar's looks like a number, such as the step."""
        tensors = [
            (key, value, self.net._trained[name])
            for name, state in whole.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        ]
        found = {key for key, value, _ in tensors if value.ndim}
        only_scalars = all(not parameter.ndim for *_, parameter in tensors)
        return {key for key, *_ in tensors if key != "step"} if only_scalars else found

    def _cut(self, name: str, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = self.net._trained[name].shape
        if value.shape != shape:
            raise ValueError(
                f"{key} of {name!r} (={list(value.shape)}) must have the parameter's shape (={list(shape)})"
            )
        return local_shard(value, self.net.num_ranks, self.net._rank).clone()
