"""ZeRO stage 1: the optimizer's state is sharded.

Every rank needs all gradients only to update all parameters, as every other rank does. So each updates its own shard,
and the two halves of an all-reduce come apart: a reduce-scatter before the update, an all-gather after it. They send
what the all-reduce sent, and the optimizer's state and work are divided by the number of ranks N.

    ================ =========================== ==============================
    tensor           on each rank                bytes on each rank, AdamW, fp32
    ================ =========================== ==============================
    parameter        ``[shape]``                 4 Psi
    gradient         ``[shape]``, then ``[c]``   4 Psi, then 4 Psi / N
    moments          ``[c]`` each, c = ceil(n/N) 8 Psi / N
    ================ =========================== ==============================

    g[r]  = row r of the sum over ranks of pack(gradients) / N      reduce-scatter, bucket by bucket as they fill
    p[r]  = chunk r of the parameters                               a view, nothing travels
    p[r] += optimizer(g[r], state[r], p[r])                         state[r] lives on rank r alone
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

from jaxddp.planning.buckets import (
    Bucket,
    BucketMb,
    BucketPlan,
    Rule,
    TensorSpec,
    bucket_width,
    dtype_bytes,
    plan_buckets,
)

from ..communication.collectives import all_gather
from ..communication.compression import Compression, check_forgets, none
from ..communication.exchange import SHARDED, InFlight
from ..communication.sharding import own_chunk, pack_chunks, pack_own, split_chunks, unpack_chunks
from ..data_parallel import DataParallel
from ..strategy import register, resolve_bucket_mb
from .elementwise import check_elementwise
from .groups import Params, as_groups
from .own_state import keep_own


@register("zero1")
class ZeRO1(DataParallel):
    """One reduce-scatter per bucket as it fills, one all-gather per bucket once its parameters are updated.

    It is its own optimizer: after the backward and ``finish_gradient_synchronization`` call ``step`` and ``zero_grad``.
    Gradients of the module's parameters are this rank's own and stay until the synchronisation; afterwards they are
    None, and the averaged ones are those of the chunks in ``optimizer.param_groups``. So clip with the wrapper's own
    ``clip_grad_norm_``: over ``parameters()``, ``torch.nn.utils.clip_grad_norm_`` finds no gradient and clips nothing.

    Attributes:
        optimizer: The optimizer over this rank's chunks, one ``[c]`` for each parameter: what a schedule drives, and
            what holds the state of this rank. Its ``state_dict`` says of which, and is refused on others.
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
        bucket_size_mb: BucketMb = "default",
        **kwargs: Any,
    ) -> None:
        """Wraps a module.

        Args:
            module: What to train.
            optimizer_cls: Makes the optimizer; it must be element-wise. ``ShardedOptimizer`` takes others.
            bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_buckets``.
            params: What the optimizer is to update, as it takes it: parameters of the module, or groups of them with
                options; all in one group when None.
            rule: When a bucket closes; see ``plan_buckets``.
            process_group: As ``DataParallel`` takes it.
            order: As ``DataParallel`` takes it.
            compression: What of the gradients travels; parameters travel as they are. None that remembers.
            bucket_size_mb: Older name of ``bucket_mb``.
            **kwargs: For ``optimizer_cls``.

        Raises:
            TypeError: If ``params`` or a group of it is a set.
            ValueError: If the optimizer is not element-wise, the compression needs whole gradients, ``params`` holds
                what is no parameter of the module, a cap or the rule is out of range, or as ``DataParallel``.
        """

        def make_plan(tensors: Sequence[TensorSpec]) -> BucketPlan:
            plan = plan_buckets(tensors, cap, rule=rule)
            return dataclasses.replace(plan, gathers=plan.buckets)

        cap = resolve_bucket_mb(bucket_mb, bucket_size_mb)
        groups = None if params is None else as_groups(params)
        check_forgets(compression, "where gradients are sharded: use none, bf16 or fp16, or a strategy of ddp/")
        check_elementwise(optimizer_cls, kwargs, next(module.parameters(), torch.empty(0)).device)
        super().__init__(module, make_plan, process_group=process_group, order=order, compression=compression)
        self._rank = dist.get_rank(process_group)
        self._chunks = {name: nn.Parameter(self._own(parameter)) for name, parameter in self._trained.items()}
        self.optimizer = optimizer_cls(self._of_chunks(groups), **kwargs)
        keep_own(self.optimizer, process_group)
        self._sums: list[torch.Tensor | None] = [None] * len(self.plan.buckets)
        self._in_flight: InFlight[tuple[int, torch.Tensor]] = InFlight()

    def step(self) -> None:
        """Updates the own chunks, and gathers everybody's into the module.

        Raises:
            RuntimeError: If there are no averaged gradients.
        """
        if all(chunk.grad is None for chunk in self._chunks.values()):
            raise RuntimeError("step needs averaged gradients: call finish_gradient_synchronization after the backward")
        for name, chunk in self._chunks.items():
            chunk.data = self._own(self._trained[name])  # the module may have been given other weights since
        self.optimizer.step()
        self._gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients: of the module, and this rank's shards."""
        super().zero_grad(set_to_none)
        self._sums = [None] * len(self.plan.buckets)
        for chunk in self._chunks.values():
            chunk.grad = None

    def planned(self, num_microbatches: int = 1) -> list[tuple[str, int]]:
        """Lists a reduce-scatter and an all-gather per bucket."""
        sums = [
            (SHARDED.kind, num_elements * dtype_bytes(dtype))
            for bucket in self.plan.buckets
            for num_elements, dtype in self.compression.wire(bucket, self._num_elements(bucket))
        ]
        return sums + [
            ("all-gather", self._num_elements(bucket) * dtype_bytes(bucket.dtype)) for bucket in self.plan.gathers
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeRO1:
        """Copies the wrapper with its module and optimizer; see ``DataParallel``."""
        new = super().__deepcopy__(memo)
        assert isinstance(new, ZeRO1)
        keep_own(new.optimizer, new.process_group)
        return new

    @torch.no_grad()
    def _gather(self) -> None:
        in_flight: InFlight[tuple[Bucket, torch.Tensor]] = InFlight()
        for bucket in self.plan.gathers:
            own = pack_own(bucket, self._chunks)
            if self.compression.sends:
                full, work = all_gather(own, self.process_group, async_op=True)
            else:
                full, work = own.repeat(self.num_ranks), None
            self._install(in_flight.add(work, (bucket, full), own))
        self._install(in_flight.wait())
        for name in self._trained.keys() - self._bucket_of.keys():
            if self._chunks[name].data_ptr() != self._trained[name].data_ptr():  # else it was updated in place
                unpack_chunks(Bucket((self._specs[name],)), self._chunks[name][None], out=self._trained)

    def _install(self, arrived: list[tuple[Bucket, torch.Tensor]]) -> None:
        for bucket, full in arrived:
            unpack_chunks(bucket, full.view(self.num_ranks, -1), out=self._trained)

    def _launch(self, index: int) -> None:
        bucket = self.plan.buckets[index]
        grads = {tensor.name: self._grad(tensor.name) for tensor in bucket.tensors}
        buffer = pack_chunks(bucket, grads, self.num_ranks)
        own, work = self.compression.travel(buffer, self.process_group, True, SHARDED)
        self._add(self._in_flight.add(work, (index, own), buffer))

    def _add(self, arrived: list[tuple[int, torch.Tensor]]) -> None:
        """Adds what has arrived to the sums over micro-batches."""
        for index, own in arrived:
            before = self._sums[index]
            self._sums[index] = own if before is None else before.add_(own)

    def _collect(self) -> None:
        self._add(self._in_flight.wait())

    def _divide(self, denominator: float) -> None:
        for bucket, own in zip(self.plan.buckets, self._sums, strict=True):
            assert own is not None
            own.div_(denominator)
            for name, grad in split_chunks(bucket, own, self.num_ranks).items():
                self._chunks[name].grad = grad
        for name in self._trained.keys() - self._bucket_of.keys():
            self._chunks[name].grad = self._own(self._grad(name)).div_(denominator)
        for parameter in self._trained.values():
            parameter.grad = None  # this rank's own sum, which nobody needs any more
        self._sums = [None] * len(self.plan.buckets)

    def _forget(self) -> None:
        self._in_flight.forget()
        self._sums = [None] * len(self.plan.buckets)

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [], [chunk.grad for chunk in self._chunks.values() if chunk.grad is not None]

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return own_chunk(tensor.detach(), self.num_ranks, self._rank)

    def _num_elements(self, bucket: Bucket) -> int:
        return self.num_ranks * bucket_width(bucket, self.num_ranks)

    def _of_chunks(self, groups: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """The groups of an optimizer, with chunks for parameters."""
        chunk_of = {id(parameter): self._chunks[name] for name, parameter in self._trained.items()}
        frozen = {id(parameter) for parameter in self.module.parameters()} - chunk_of.keys()
        found = []
        for group in [{"params": self._trained.values()}] if groups is None else groups:
            ids = [id(one) for one in group["params"]]
            if not frozen.union(chunk_of).issuperset(ids):
                raise ValueError("params must be parameters of the module, or groups of them; one is not")
            found.append({**group, "params": [chunk_of[key] for key in ids if key not in frozen]})
        return found
