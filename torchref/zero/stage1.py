"""ZeRO stage 1: the optimizer's state is sharded.

Each rank updates its own shard of the parameters. The all-reduce of the gradients becomes a reduce-scatter before the
update and an all-gather of the parameters after it: the same bytes, with the optimizer's state and work divided by the
number of ranks N.

    ================ =========================== ==============================
    tensor           on each rank                bytes on each rank, AdamW, fp32
    ================ =========================== ==============================
    parameter        ``[shape]``                 4 Psi
    gradient         ``[shape]``, then ``[c]``   4 Psi, then 4 Psi / N
    moments          ``[c]`` each, c = ceil(n/N) 8 Psi / N
    ================ =========================== ==============================

    g[r]  = row r of the sum over ranks of pack(gradients) / N      reduce-scatter, bucket by bucket as they fill
    p[r]  = chunk r of the parameters                               a view, no communication
    p[r] += optimizer(g[r], state[r], p[r])                         state[r] is on rank r alone
    p     = unpack(p[0] ... p[N-1])                                 all-gather, bucket by bucket

    calls per step: two per bucket      bytes sent per rank: 2 (N-1)/N * parameter bytes

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jaxddp.communication.buckets import (
    Bucket,
    BucketMb,
    BucketPlan,
    Rule,
    TensorSpec,
    bucket_width,
    dtype_bytes,
    plan_buckets,
)

from ..agreement import StateLoads, check_alike
from ..communication.collectives import all_gather
from ..communication.compression import Compression, check_stateless, none
from ..communication.reduction import REDUCE_SCATTER, InFlight
from ..communication.sharding import local_shard, pack_chunks, pack_local_shards, split_chunks, unpack_chunks
from ..gradients import PartialGradient, SpentGradient, spent_gradient
from ..strategy import DataParallel, Sync, check_wrapped, register, resolve_bucket_mb
from .elementwise import check_elementwise, own_parts
from .optimizers import (
    ADVICE,
    Params,
    as_groups,
    describe_optimizer,
    describe_state,
    grad_versions,
    guard_step,
    make_optimizer,
    mark_state_dicts,
)


@register("zero1")
class ZeRO1(DataParallel):
    """One reduce-scatter per bucket as it fills, one all-gather per bucket as its parameters are updated.

    It owns the optimizer: after ``finish_gradient_synchronization`` call ``step`` and ``zero_grad`` of the wrapper.
    Until the synchronisation the module's gradients are this rank's local ones. Afterwards ``SpentGradient`` stands in
    their place up to the next backward, and the averaged ones belong to the shards in ``optimizer.param_groups``.
    Where it is cleared, as by ``zero_grad`` of the module or of a part of it, so is the averaged one. Clip with
    ``clip_grad_norm_`` of the wrapper: ``torch.nn.utils.clip_grad_norm_`` is refused.

    Attributes:
        optimizer: The optimizer over this rank's shards, one ``[c]`` for each parameter. A schedule drives it. Its
            ``state_dict`` is marked with this rank, and another rank refuses to load it: ``ZeROOptimizer`` has one that
            any number of ranks loads.
        params_of_groups: The module's parameters in each of the optimizer's groups, frozen ones included.
    """

    owns_optimizer = True

    def __init__(
        self,
        module: nn.Module,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        bucket_mb: BucketMb = "default",
        *,
        params: Params | None = None,
        rule: Rule = "before",
        process_group: dist.ProcessGroup | None = None,
        order: Sequence[str] | None = None,
        compression: Compression = none,
        broadcast_buffers: bool = True,
        sync: Sync = "finish",
        bucket_size_mb: BucketMb = "default",
        **kwargs: Any,
    ) -> None:
        """Wraps a module.

        Args:
            module: What to train.
            optimizer_cls: Must be element-wise; ``ShardedOptimizer`` takes others.
            bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_buckets``.
            params: What the optimizer updates: parameters of the module, or groups of them with options; all
                parameters in one group when None.
            rule: When a bucket closes; see ``plan_buckets``.
            process_group: As ``DataParallel`` takes it.
            order: As ``DataParallel`` takes it.
            compression: Gradient compression; must be stateless. Parameters are gathered uncompressed.
            broadcast_buffers: As ``DataParallel`` takes it.
            sync: As ``DataParallel`` takes it.
            bucket_size_mb: Older name of ``bucket_mb``.
            **kwargs: For ``optimizer_cls``.

        Raises:
            TypeError: If ``params`` or a group of it is a set.
            ValueError: If the optimizer is not element-wise, its class, groups or options differ by rank, the
                compression has state, ``params`` holds a tensor that is no parameter of the module, a cap or the rule
                is out of range, or as ``DataParallel``.
        """

        def make_plan(tensors: Sequence[TensorSpec]) -> BucketPlan:
            plan = plan_buckets(tensors, cap, rule=rule)
            return dataclasses.replace(plan, gathers=plan.buckets)

        check_wrapped(module, compression, process_group)
        cap = resolve_bucket_mb(bucket_mb, bucket_size_mb)
        plan_buckets([], cap, rule=rule)  # refuses a bad cap before the optimizer is tried
        groups = None if params is None else as_groups(params)
        check_stateless(compression, "where gradients are sharded: use none, bf16 or fp16, or a strategy of ddp/")
        check_elementwise(optimizer_cls, kwargs, next(module.parameters(), torch.empty(0)).device)
        super().__init__(
            module,
            make_plan,
            process_group=process_group,
            order=order,
            compression=compression,
            broadcast_buffers=broadcast_buffers,
            sync=sync,
        )
        self._rank = dist.get_rank(process_group)
        self._shards = {name: nn.Parameter(self._local_shard(parameter)) for name, parameter in self._trained.items()}
        if groups is None:
            groups = [{"params": list(module.parameters())}]
        self.params_of_groups = [group["params"] for group in groups]
        self.optimizer = make_optimizer(optimizer_cls, self._shard_groups(groups), kwargs)
        if self.num_ranks > 1:
            names = {id(shard): name for name, shard in self._shards.items()}
            check_alike(describe_optimizer(self.optimizer, names), process_group)
        self._watch_optimizer()
        self._spent = {name: spent_gradient(parameter) for name, parameter in self._trained.items()}
        self._sums: list[torch.Tensor | None] = [None] * len(self.plan.buckets)
        self._in_flight: InFlight[tuple[int, torch.Tensor]] = InFlight()
        self._has_spent = False  # all gradients are in shards
        self._adds = False  # the pass adds to some of them

    def step(self) -> None:
        """Updates this rank's shards, and gathers those of all ranks into the module.

        Raises:
            RuntimeError: If there are no averaged gradients, a backward has followed them, the module was given others,
                or the optimizer has got hooks or another ``step``.
            ValueError: If state was loaded since the last step, and not on all ranks or not of the same steps and
                options.
        """
        self._check_finished()
        self._drop_cleared()
        if all(shard.grad is None for shard in self._shards.values()):
            raise RuntimeError("step needs averaged gradients: call finish_gradient_synchronization after the backward")
        if self._has_spent and not all(isinstance(p.grad, (SpentGradient, type(None))) for p in self._trained.values()):
            raise RuntimeError(
                "gradients were set after finish_gradient_synchronization, which the step would not use: change those"
                " of the shards in optimizer.param_groups"
            )
        self._has_optimizer = True
        if own_parts(self.optimizer) != self._made_with:
            raise RuntimeError(
                f"optimizer (={type(self.optimizer).__name__}) got hooks or another step after wrapping, which see this"
                f" rank's shards alone: {ADVICE}"
            )
        for name, shard in self._shards.items():
            shard.data = self._local_shard(self._trained[name])  # other weights may have been loaded into the module
        self._loads.announce(self._describe_loaded)
        self._may_step.append(grad_versions(self.optimizer))
        try:
            self.optimizer.step()
        finally:
            self._may_step.clear()
        self._gather()
        self._loads.compare()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the module and of this rank's shards."""
        self._remove_spent()
        self._clear_shards()
        super().zero_grad(set_to_none)
        self._sums = [None] * len(self.plan.buckets)

    def discard_pass(self) -> None:
        """Discards a backward pass that was never finished; what earlier ones have left in shards stays there."""
        super().discard_pass()
        if self._adds and not self._has_spent:
            self._stand_in()  # for the module to clear

    def local_shards(self) -> dict[str, tuple[torch.Tensor, torch.Size]]:
        """Of all trained parameters; the module's own are whole."""
        return {name: (shard, self._trained[name].shape) for name, shard in self._shards.items()}

    def _planned_collectives(self, num_microbatches: int) -> list[tuple[str, int]]:
        gathers = [
            ("all-gather", self._num_elements(bucket) * dtype_bytes(bucket.dtype)) for bucket in self.plan.gathers
        ]
        return self._planned_reductions() + gathers

    def _planned_reductions(self) -> list[tuple[str, int]]:
        return [
            (REDUCE_SCATTER.kind, num_elements * dtype_bytes(dtype))
            for bucket in self.plan.buckets
            for num_elements, dtype in self.compression.wire_buffers(bucket, self._num_elements(bucket))
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeRO1:
        """Copies the wrapper with its module and optimizer; see ``DataParallel``."""
        new = super().__deepcopy__(memo)
        assert isinstance(new, ZeRO1)
        new._watch_optimizer()
        return new

    def _watch_optimizer(self) -> None:
        mark_state_dicts(self.optimizer, self.process_group)
        self._loads = StateLoads(self.process_group)
        self.optimizer.register_load_state_dict_post_hook(self._loads.note)
        self._may_step = guard_step(self.optimizer)
        self._made_with = own_parts(self.optimizer)

    def _describe_loaded(self) -> dict[str, Any]:
        names = {id(shard): name for name, shard in self._shards.items()}
        return describe_optimizer(self.optimizer) | describe_state(self.optimizer, names)

    def _discard_if_cleared(self) -> None:
        self._drop_cleared()
        if self._has_begun and self._is_cleared():
            self._clear_shards()  # of what earlier synchronisations have left
        super()._discard_if_cleared()

    def _on_arrival(self, name: str, *_: Any) -> None:
        if self._has_spent:
            self._drop_cleared(arrived=name)
            self._remove_spent()  # autograd keeps a gradient that it need not add
            parameter = self._trained[name]
            assert parameter.grad is not None
            parameter.grad = parameter.grad.as_subclass(torch.Tensor)
            self._adds = any(shard.grad is not None for shard in self._shards.values())
        if self._adds:
            self._check_sent(name, num_additions=1)
        super()._on_arrival(name)
        if self._adds:  # a change, or a gradient that is cleared, would miss what is in the shard
            self._note_sent(name)

    def _grad(self, name: str) -> torch.Tensor:
        if isinstance(self._trained[name].grad, SpentGradient):
            self._trained[name].grad = None
        return super()._grad(name)

    def _drop_cleared(self, arrived: str = "") -> None:
        """Clears in shards what was cleared in the module: where no ``SpentGradient`` stands any more.

        ``arrived`` has got another gradient since, of a type that tells whether one stood there.
        """
        for name, parameter in self._trained.items() if self._has_spent else ():
            if isinstance(parameter.grad, PartialGradient if name == arrived else SpentGradient):
                continue
            self._shards[name].grad = None
            index = self._bucket_of.get(name)
            row = None if index is None else self._sums[index]
            if index is not None and row is not None:
                split_chunks(self.plan.buckets[index], row, self.num_ranks)[name].zero_()

    def _stand_in(self) -> None:
        """Puts a ``SpentGradient`` where a shard has a gradient."""
        for name, parameter in self._trained.items():
            parameter.grad = None if self._shards[name].grad is None else self._spent[name]
        self._has_spent = True

    def _remove_spent(self) -> None:
        for parameter in self._trained.values():
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
        self._has_spent = False

    def _clear_shards(self) -> None:
        self._adds = False
        for shard in self._shards.values():
            shard.grad = None

    @torch.no_grad()
    def _gather(self) -> None:
        in_flight: InFlight[tuple[Bucket, torch.Tensor]] = InFlight()
        for bucket in self.plan.gathers:
            row = pack_local_shards(bucket, self._shards)
            if self.compression.sends:
                full, work = all_gather(row, self.process_group, async_op=True)
            else:
                full, work = row.repeat(self.num_ranks), None
            self._install(in_flight.add(work, (bucket, full), row))
        self._install(in_flight.wait())
        for name in self._trained.keys() - self._bucket_of.keys():
            if self._shards[name].data_ptr() != self._trained[name].data_ptr():  # else it was updated in place
                unpack_chunks(Bucket((self._specs[name],)), self._shards[name][None], out=self._trained)

    def _install(self, arrived: list[tuple[Bucket, torch.Tensor]]) -> None:
        for bucket, full in arrived:
            unpack_chunks(bucket, full.view(self.num_ranks, -1), out=self._trained)

    def _start_reduction(self, index: int) -> None:
        bucket = self.plan.buckets[index]
        grads = {tensor.name: self._grad(tensor.name) for tensor in bucket.tensors}
        buffer = pack_chunks(bucket, grads, self.num_ranks)
        row, work = self.compression.reduce(buffer, self.process_group, True, REDUCE_SCATTER, self._divisor)
        self._accumulate(self._in_flight.add(work, (index, row), buffer))

    def _accumulate(self, arrived: list[tuple[int, torch.Tensor]]) -> None:
        """Adds reduced buckets to the sums over micro-batches."""
        for index, row in arrived:
            before = self._sums[index]
            self._sums[index] = row if before is None else before.add_(row)

    def _finish_reductions(self, denominator: float) -> None:
        self._accumulate(self._in_flight.wait())
        for bucket, row in zip(self.plan.buckets, self._sums, strict=True):
            assert row is not None
            for name, grad in split_chunks(bucket, row.div_(denominator), self.num_ranks).items():
                self._add_grad(name, grad)
        for name in self._trained.keys() - self._bucket_of.keys():
            self._add_grad(name, self._local_shard(self._grad(name)).div_(denominator))
        self._stand_in()  # frees the local gradients
        self._sums = [None] * len(self.plan.buckets)

    def _add_grad(self, name: str, grad: torch.Tensor) -> None:
        """Adds to what earlier synchronisations have left, as autograd does."""
        before = self._shards[name].grad
        total = grad if before is None else before.add_(grad)
        self._shards[name].grad = total.as_subclass(PartialGradient) if self.num_ranks > 1 else total

    def _drop_reductions(self) -> None:
        self._in_flight.forget()
        self._sums = [None] * len(self.plan.buckets)

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self._drop_cleared()
        return [], [one.grad.as_subclass(torch.Tensor) for one in self._shards.values() if one.grad is not None]

    def _local_shard(self, tensor: torch.Tensor) -> torch.Tensor:
        return local_shard(tensor.detach(), self.num_ranks, self._rank)

    def _num_elements(self, bucket: Bucket) -> int:
        return self.num_ranks * bucket_width(bucket, self.num_ranks)

    def _shard_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with this rank's shards in place of the parameters."""
        shard_of = {id(parameter): self._shards[name] for name, parameter in self._trained.items()}
        frozen = {id(parameter) for parameter in self.module.parameters()} - shard_of.keys()
        found = []
        for group in groups:
            ids = [id(one) for one in group["params"]]
            if not frozen.union(shard_of).issuperset(ids):
                raise ValueError("params must be parameters of the module, or groups of them; one is not")
            found.append({**group, "params": [shard_of[key] for key in ids if key not in frozen]})
        return found
