"""ZeRO stage 3: parameters are sharded as well, as fully sharded data parallelism has it.

Between its uses a sharded parameter is nowhere whole. A unit, which is a module of one of ``shard_types``, gathers its
own before its forward, drops them, and gathers them again when the backward needs them; its gradients leave by
reduce-scatter, which is the transpose of the gather. What is left on a rank is 1/N of everything, the unit at work, and
the parameters of other modules, which stay whole.

    ===================== ====================== ==============================================
    tensor                on each rank           bytes on each rank, AdamW, fp32
    ===================== ====================== ==============================================
    sharded parameter     ``[c]``, c = ceil(n/N) 4 Psi / N, and one unit's whole
    its gradient          ``[c]``                4 Psi / N, one unit's whole, and two in flight
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

Collectives wait for nothing but are waited for: gathers are not started ahead of their use. Of gradients two are in
flight beside the backward.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.3).
    Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from jaxddp.planning.buckets import BucketMb, Rule, plan_buckets

from ..communication.compression import Compression, none
from ..communication.exchange import SHARDED, InFlight
from ..hooks import remove_with
from ..replicated import Replicated
from ..strategy import register
from .gather import Arrival, Shards, accumulate
from .own_state import check_own, whose
from .units import Unit


@register("zero3")
class FSDP(Replicated):
    """Shards the parameters of some modules; they are whole while they are used.

    ``parameters()`` are the shards, one-dimensional and of the parameters' own dtype, and what stays whole. Make the
    optimizer over them after wrapping; it must be element-wise where it meets shards, and choose groups by name, since
    the number of dimensions tells nothing. Gradients have the shape and the dtype of the shards. A backward pass
    communicates the shards' gradients under ``no_sync`` too; the others are accumulated whole. Clip with the wrapper's
    own ``clip_grad_norm_``: ``torch.nn.utils.clip_grad_norm_`` would find another norm on each rank, of its shards.

    All ranks must use the same units in the same order. A parameter must be used within its own module's forward only,
    since elsewhere it is a flat shard: a parent that reads ``child.weight`` fails, as a rule with an error about sizes.
    Two units may share one.

    Sharding is for good. ``state_dict`` is this rank's, and ``load_state_dict`` refuses another's. When the wrapper is
    deleted its hooks go, and the module is left with shards, which no strategy wraps again: call
    ``gather_full_params`` before, and load what it gives into a new module.
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
        order: Sequence[str] | None = None,
        compression: Compression = none,
    ) -> None:
        """Wraps a module.

        Args:
            module: What to train.
            compute_dtype: What parameters are gathered in and modules compute in: floating-point arguments of each
                module that has parameters are cast to it, too. As they are if None.
            shard_types: Modules of these types are units: the parameters that are directly theirs are sharded.
            reduce_dtype: What gradients of shards are summed in; their parameter's own dtype if None.
            bucket_mb: Of the gradients that are not sharded; see ``plan_buckets``.
            rule: Of the same; see ``plan_buckets``.
            process_group: As ``DataParallel`` takes it.
            order: As ``DataParallel`` takes it, of the parameters that are not sharded.
            compression: ``none``, or ``noop`` for a step without communication; the dtypes say what else travels.

        Raises:
            ValueError: If there is no parameter to shard, a unit shares one with a module that is none or uses its own
                in a way that cannot be followed, a dtype is not floating-point, or as ``BucketedDDP``.
        """
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} (={dtype}) must be a floating-point dtype or None")
        if compression.name not in ("none", "noop"):
            raise ValueError(f"compression (={compression.name!r}) must be none or noop at stage 3: use reduce_dtype")
        own = {one: dict(one.named_parameters(recurse=False, remove_duplicate=False)) for one in module.modules()}
        to_shard = _find_units(module, own, shard_types)
        ids = {id(parameter) for one in to_shard for parameter in own[one].values()}
        in_flight: InFlight[Arrival] = InFlight()

        def shard() -> None:
            self._units = {}
            cut: dict[int, nn.Parameter] = {}
            for one, whole in own.items():
                if one in to_shard:
                    shards = Shards(whole, cut, process_group, compression, in_flight, compute_dtype, reduce_dtype)
                    self._units[one] = Unit(one, shards, {}, compute_dtype)
                elif whole and compute_dtype is not None:
                    self._units[one] = Unit(one, None, whole, compute_dtype)

        super().__init__(
            module,
            lambda tensors: plan_buckets(tensors, bucket_mb, rule=rule),
            process_group=process_group,
            order=order,
            compression=compression,
            sharded={name for name, parameter in module.named_parameters() if id(parameter) in ids},
            shard=shard,
        )
        self._in_flight = in_flight

    def get_extra_state(self) -> dict[str, int]:
        """Says whose shards a ``state_dict`` holds."""
        return whose(self.process_group)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Refuses the shards of another rank, before any is loaded.

        Args:
            state: What ``get_extra_state`` gave.

        Raises:
            ValueError: If it is another rank's, or of another number of ranks.
        """
        check_own(state, self.process_group)

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Puts all parameters together; a collective, which every rank must call.

        Returns:
            Copies by original name, of original shape and dtype; a shared parameter under each of its names.
        """
        full = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            unit = self._units.get(module)
            whole = unit.shards.gather_masters() if unit is not None and unit.shards is not None else {}
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                full[f"{prefix}.{name}".lstrip(".")] = whole[name] if name in whole else parameter.detach().clone()
        return full

    def planned(self, num_microbatches: int = 1) -> list[tuple[str, int]]:
        """Lists the collectives of units in a row, each used once, whose inputs all need a gradient."""
        forward: list[tuple[str, int]] = []
        backward: list[tuple[str, int]] = []
        for unit in self._units.values():
            if unit.shards is not None and unit.shards.communicates:
                gathers = [("all-gather", size) for size in unit.shards.num_bytes(unit.shards.compute_plan)]
                sums = [(SHARDED.kind, size) for size in unit.shards.num_bytes(unit.shards.reduce_plan)]
                forward += gathers
                backward = [*(gathers if unit.needed_again else ()), *sums, *backward]
        return (forward + backward) * num_microbatches + super().planned()

    def _add_hooks(self) -> None:
        super()._add_hooks()
        remove_with(self, [handle for unit in self._units.values() for handle in unit.handles])

    def _collect(self) -> None:
        accumulate(self._in_flight.wait(), self.num_ranks)
        self._drop_units()
        super()._collect()

    def _forget(self) -> None:
        self._in_flight.forget()
        self._drop_units()
        super()._forget()

    def _drop_units(self) -> None:
        for unit in self._units.values():
            if unit.shards is not None:
                unit.shards.drop()

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        grads = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        replicated = [grad for name, grad in grads.items() if name not in self._sharded]
        return replicated, [grad for name, grad in grads.items() if name in self._sharded]


def _find_units(
    module: nn.Module, own: dict[nn.Module, dict[str, nn.Parameter]], shard_types: tuple[type[nn.Module], ...]
) -> set[nn.Module]:
    """The modules whose own parameters are to be sharded."""
    # The last one is used by its parent, which reads its weight and never calls it.
    units = {
        one
        for one, parameters in own.items()
        if parameters and isinstance(one, shard_types) and not isinstance(one, NonDynamicallyQuantizableLinear)
    }
    if not units:
        names = ", ".join(kind.__name__ for kind in shard_types)
        raise ValueError(f"module (={type(module).__name__}) must have parameters in modules of shard_types (={names})")
    whole_in = {id(parameter): one for one in own.keys() - units for parameter in own[one].values()}
    for path, one in module.named_modules():
        for name, parameter in own[one].items() if one in units else ():
            full_name = f"{path}.{name}".lstrip(".")
            if id(parameter) in whole_in:
                raise ValueError(
                    f"parameter {full_name!r} is shared with a {type(whole_in[id(parameter)]).__name__}, which is not"
                    " sharded: add its type to shard_types"
                )
            if isinstance(one, nn.RNNBase) or getattr(one, "max_norm", None) is not None:
                raise ValueError(
                    f"parameter {full_name!r} cannot be sharded: {one} keeps or changes its weights itself"
                )
    return units
