"""ZeRO stage 3 (fully sharded data parallelism): parameters are sharded as well.

A sharded parameter is full only while it is used. A unit, which is a module of one of ``shard_types``, gathers its
parameters before its forward, drops them, and gathers them again when the backward needs them. Its gradients are
reduce-scattered, which is the transpose of the gather. A rank holds 1/N of everything, the unit that is running,
and the parameters of other modules, which stay replicated.

    ===================== ====================== ==============================================
    tensor                on each rank           bytes on each rank, AdamW, fp32
    ===================== ====================== ==============================================
    sharded parameter     ``[c]``, c = ceil(n/N) 4 Psi / N, and one full unit
    its gradient          ``[c]``                4 Psi / N, one full unit, and two in flight
    its moments           ``[c]`` each           8 Psi / N
    replicated parameter  ``[shape]``            16 Psi, with gradient and moments
    ===================== ====================== ==============================================

    forward   of unit u:  p = all-gather of p[r]           y = u(p, x)                 drop p
    backward  of unit u:  p = all-gather of p[r]           dx, dp = u'(p, x, dy)       drop p
                          g[r] += row r of the sum over ranks of dp                    reduce-scatter, drop dp
    rest                  g = sum over ranks of d rest                                 all-reduce, bucket by bucket
    update                p[r] += optimizer(g[r] / N, state[r], p[r])

    calls per step: 3 per unit, less one where the backward needs no weight (an embedding, a first layer)
    bytes sent per rank: 3 (N-1)/N * parameter bytes, less that

Gathers are not prefetched: the forward and the backward wait for each. Of the gradients' reduce-scatters, up to two are
in flight during the backward.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.3).
    Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, arXiv:2304.11277.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from jaxddp.communication.buckets import BucketMb, Rule, plan_buckets

from ..communication.compression import Compression, none
from ..communication.reduction import REDUCE_SCATTER
from ..hooks import check_not_sharded, remove_hooks_with, weakly
from ..replicated import Replicated
from ..strategy import check_dtype, check_wrapped, register
from .elementwise import own_parts, try_elementwise
from .gather import Arrivals, Shards, accumulate, put_back, take_finished
from .optimizers import check_marks, rank_marks
from .units import Unit

_tried: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[Any]] = weakref.WeakKeyDictionary()  # with own_parts


@register("zero3")
class FSDP(Replicated):
    """Shards the parameters of some modules, which are full only while they are used.

    ``parameters()`` are the shards, flat and in the parameters' own dtype, and the replicated parameters. Make the
    optimizer over them after wrapping. It must be element-wise on shards, and is refused at its first step if a trial
    finds that it is not; choose its groups by name, because all shards have one dimension. Every backward reduces the
    shards' gradients, even under ``no_sync``; the replicated ones are accumulated. Clip with ``clip_grad_norm_`` of the
    wrapper: ``torch.nn.utils.clip_grad_norm_`` would compute the norm of this rank's shards alone, and is refused.

    All ranks must use the same units in the same order. A parameter may be used only within its own module's forward:
    elsewhere it is a flat shard, so a parent that reads ``child.weight`` usually fails with an error about sizes. Two
    units may share a parameter. A forward that changes its gathered parameters, as by ``weight.data.clamp_()``, is
    refused: change the shards after the step.

    A ``torch.amp.GradScaler`` looks at this rank's gradients alone, and ranks would skip steps apart. The first step
    that it takes is refused: use ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``.

    Sharding is permanent. ``state_dict`` is this rank's, and ``load_state_dict`` refuses another rank's. A deleted
    wrapper leaves the module with its shards, which no strategy wraps again: call ``gather_full_params`` before, and
    load the result into a new module.
    """

    _units: dict[nn.Module, Unit]

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        shard_types: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding),
        *,
        reduce_dtype: torch.dtype | None = None,
        bucket_mb: BucketMb = "default",
        rule: Rule = "before",
        process_group: dist.ProcessGroup | None = None,
        compression: Compression = none,
        **options: Any,
    ) -> None:
        """Wraps a module.

        Args:
            module: What to train.
            compute_dtype: Parameters are gathered and modules compute in this dtype: the floating-point arguments of
                each module with parameters are cast to it. No casts if None.
            shard_types: Modules of these types are units: the parameters directly in them are sharded.
            reduce_dtype: Gradients of shards are summed in this dtype; in their parameter's if None.
            bucket_mb: Cap of the buckets of replicated gradients; see ``plan_buckets``.
            rule: When these buckets close; see ``plan_buckets``.
            process_group: As ``DataParallel`` takes it.
            compression: ``none``, or ``noop`` for a step without communication; use the dtypes to send less.
            **options: Of ``DataParallel``: ``order``, of the replicated parameters, ``broadcast_buffers``, ``sync``.

        Raises:
            ValueError: If there is no parameter to shard, a unit shares one with a module that is no unit, a unit keeps
                or changes its weights itself, a dtype is not floating-point, or as ``BucketedDDP``.
        """
        check_wrapped(module, compression, process_group)
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
            check_dtype(name, dtype)
        shard_types = (shard_types,) if isinstance(shard_types, type) else shard_types
        if not isinstance(shard_types, tuple) or not all(isinstance(one, type) for one in shard_types):
            raise ValueError(f"shard_types (={shard_types!r}) must be a tuple of classes of modules")
        if compression.name not in ("none", "noop"):
            raise ValueError(f"compression (={compression.name!r}) must be none or noop at stage 3: use reduce_dtype")
        direct = {one: dict(one.named_parameters(recurse=False, remove_duplicate=False)) for one in module.modules()}
        check_not_sharded(module)
        to_shard = _find_units(module, direct, shard_types)
        ids = {id(parameter) for one in to_shard for parameter in direct[one].values()}
        in_flight = Arrivals()

        def shard() -> None:
            self._units, self._in_flight = {}, in_flight
            cut: dict[int, nn.Parameter] = {}
            for one, params in direct.items():
                if one in to_shard:
                    shards = Shards(params, cut, process_group, compression, in_flight, compute_dtype, reduce_dtype)
                    self._units[one] = Unit(one, shards, {}, compute_dtype)
                elif params and compute_dtype is not None:
                    self._units[one] = Unit(one, None, params, compute_dtype)

        super().__init__(
            module,
            lambda tensors: plan_buckets(tensors, bucket_mb, rule=rule),
            process_group=process_group,
            compression=compression,
            sharded={name for name, parameter in module.named_parameters() if id(parameter) in ids},
            shard=shard,
            **options,
        )

    def get_extra_state(self) -> dict[str, int]:
        """Marks a ``state_dict`` with this rank."""
        return rank_marks(self.process_group)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a ``state_dict`` of another rank, before any shard is loaded.

        Raises:
            ValueError: If it is another rank's, or of another number of ranks.
        """
        check_marks(state, self.process_group)

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """As in ``DataParallel``, in the original shapes and dtypes."""
        full = super().gather_full_params()
        for prefix, shards in self._named_shards():
            full.update((f"{prefix}{name}", tensor) for name, tensor in shards.gather_masters().items())
        return full

    def local_shards(self) -> dict[str, tuple[torch.Tensor, torch.Size]]:
        """Of the parameters of all units, which are the module's own; a shared one under each of its names."""
        named = [(prefix, shards, name) for prefix, shards in self._named_shards() for name in shards.specs]
        return {
            f"{prefix}{name}": (shards.parameters[name], torch.Size(shards.specs[name].shape))
            for prefix, shards, name in named
        }

    def _named_shards(self) -> Iterator[tuple[str, Shards]]:
        """The shards of each unit, with what comes before the parameters' names in it."""
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            unit = self._units.get(module)
            if unit is not None and unit.shards is not None:
                yield prefix and f"{prefix}.", unit.shards

    def _planned_collectives(self, num_microbatches: int) -> list[tuple[str, int]]:
        """The collectives if all units run once, in order, on inputs that need a gradient."""
        forward: list[tuple[str, int]] = []
        backward: list[tuple[str, int]] = []
        for unit in self._units.values():
            if unit.shards is not None and unit.shards.communicates:
                gathers = [("all-gather", size) for size in unit.shards.num_bytes(unit.shards.compute_plan)]
                sums = [(REDUCE_SCATTER.kind, size) for size in unit.shards.num_bytes(unit.shards.reduce_plan)]
                forward += gathers
                backward = [*(gathers if unit.needed_again else ()), *sums, *backward]
        return (forward + backward) * num_microbatches + super()._planned_collectives(num_microbatches)

    def _add_hooks(self) -> None:
        super()._add_hooks()
        if self.sync == "backward":
            self._in_flight.on_begin = weakly(self._finish_with_backward)
        remove_hooks_with(self, [handle for unit in self._units.values() for handle in unit.handles])
        shards = [(name, self._trained[name]) for name in self._trained.keys() & self._sharded]
        remove_hooks_with(self, [shard.register_hook(partial(_refuse_direct, name)) for name, shard in shards])

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        super()._check_step(optimizer)
        shards = {id(self._trained[name]): self._trained[name] for name in self._trained.keys() & self._sharded}
        if any(id(one) in shards for group in optimizer.param_groups for one in group["params"]):
            if self.num_ranks > 1:
                _refuse_scaler(optimizer)
            parts = own_parts(optimizer)
            if _tried.get(optimizer) != parts:
                try_elementwise(optimizer, next(iter(shards.values())).device)
                _tried[optimizer] = parts

    def _finish_reductions(self, denominator: float) -> None:
        accumulate(self._in_flight.wait(), self.num_ranks)
        self._drop_units()
        shards = [parameter for name, parameter in self._trained.items() if name in self._sharded]
        for shard in shards:
            take_finished(shard)
        super()._finish_reductions(denominator)
        for shard in shards:
            put_back(shard, self.num_ranks)
        self._in_flight.forget()

    def _drop_reductions(self) -> None:
        self._in_flight.forget()
        self._drop_units()
        super()._drop_reductions()

    @property
    def _has_begun(self) -> bool:
        return self._begun or self._in_flight.has_begun

    @_has_begun.setter
    def _has_begun(self, value: bool) -> None:
        self._begun = value

    def _check_last_pass(self) -> None:
        super()._check_last_pass()
        if self._begins_pass and not self._has_begun:  # no forward may change shards
            self._note_weights()

    def _drop_units(self) -> None:
        for unit in self._units.values():
            if unit.shards is not None:
                unit.shards.drop()

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        grads = {name: p.grad.as_subclass(torch.Tensor) for name, p in self._trained.items() if p.grad is not None}
        replicated = [grad for name, grad in grads.items() if name not in self._sharded]
        return replicated, [grad for name, grad in grads.items() if name in self._sharded]


def _refuse_direct(name: str, grad: torch.Tensor | None) -> None:
    # Gradients of gathered parameters are added past autograd, which gives None: any other is of the shard.
    if grad is not None:
        raise RuntimeError(
            f"a gradient reached the shard of {name!r} directly, where it stands for the full parameter: use a"
            " parameter within its module's forward only, and for a penalty the optimizer's weight_decay"
        )


def _refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Refuses a step on shards that a scaler takes because this rank's gradients are finite."""
    scaler, state = _calling_scaler(optimizer)
    if scaler is None:
        return
    if type(scaler).unscale_ is GradScaler.unscale_ or state["stage"] is OptState.READY:  # not unscaled by its own
        raise RuntimeError(
            f"{type(scaler).__name__}.step looks at this rank's shards alone, and ranks would skip steps apart: use"
            " torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call its unscale_ before a fused step"
        )


def _calling_scaler(optimizer: torch.optim.Optimizer) -> tuple[GradScaler | None, Any]:
    """The scaler that has called an optimizer's step, and its state of the optimizer: a scaler passes neither."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            scaler = frame.f_locals["self"]
            return (scaler, scaler._per_optimizer_states[id(optimizer)]) if scaler.is_enabled() else (None, None)
        frame = frame.f_back
    return None, None


def _find_units(
    module: nn.Module, direct: dict[nn.Module, dict[str, nn.Parameter]], shard_types: tuple[type[nn.Module], ...]
) -> set[nn.Module]:
    """The modules to shard; ``direct`` maps each module to the parameters directly in it."""
    # MultiheadAttention reads the weight of its NonDynamicallyQuantizableLinear and never calls it.
    units = {
        one
        for one, parameters in direct.items()
        if parameters and isinstance(one, shard_types) and not isinstance(one, NonDynamicallyQuantizableLinear)
    }
    if not units:
        names = ", ".join(kind.__name__ for kind in shard_types)
        raise ValueError(f"module (={type(module).__name__}) must have parameters in modules of shard_types (={names})")
    replicated_in = {id(parameter): one for one in direct.keys() - units for parameter in direct[one].values()}
    for path, one in module.named_modules():
        for name, parameter in direct[one].items() if one in units else ():
            full_name = f"{path}.{name}".lstrip(".")
            if id(parameter) in replicated_in:
                other = type(replicated_in[id(parameter)]).__name__
                raise ValueError(
                    f"parameter {full_name!r} is shared with a {other}, which is not"
                    " sharded: add its type to shard_types"
                )
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"parameter {full_name!r} has hooks, which its shard would lose: remove them, and change gradients"
                    " after finish_gradient_synchronization"
                )
            if isinstance(one, nn.RNNBase) or getattr(one, "max_norm", None) is not None:
                raise ValueError(
                    f"parameter {full_name!r} cannot be sharded: {one} keeps or changes its weights itself"
                )
    return units
