"""The gather of a unit's shards as a differentiable operation, whose transpose is a reduce-scatter of the gradients.

    forward   full [shape] = unpack(all-gather of [width])              in the compute dtype
    backward  shard.grad [c] += row r of the sum over ranks of d full   in the reduction's dtype, then the shard's

Autograd gets no gradient for the shards: the reduce-scatter is in flight while the backward goes on, and its result is
added to ``shard.grad`` when it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jaxddp.communication.buckets import Bucket, BucketPlan, TensorSpec, bucket_width, dtype_bytes, plan_buckets

from ..communication.buffers import check_dense, tensor_spec
from ..communication.collectives import all_gather
from ..communication.compression import Compression
from ..communication.reduction import REDUCE_SCATTER, InFlight
from ..communication.sharding import local_shard, pack_chunks, pack_local_shards, split_chunks, unpack_chunks
from ..gradients import PartialGradient

Arrival = tuple[Bucket, dict[str, nn.Parameter], torch.Tensor]  # bucket, its shards by name, this rank's row of the sum


class Arrivals(InFlight[Arrival]):
    """The reduce-scatters of a backward, which are waited for when it ends.

    Attributes:
        has_begun: Whether one was added since the last synchronisation.
        on_begin: Called when gradients of a unit are announced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = self._waits_for_end = False
        self.on_begin: Callable[[], Any] | None = None

    def begin(self, num_ranks: int) -> None:
        """Announces gradients of the running backward; when it ends, their reduce-scatters are waited for."""
        self.has_begun = True
        if not self._waits_for_end:
            self._waits_for_end = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(num_ranks))
        if self.on_begin is not None:  # what it queues comes after the gradients have arrived
            self.on_begin()

    def forget(self) -> None:
        """Drops all reduce-scatters in flight, and their results."""
        super().forget()
        self.has_begun = self._waits_for_end = False

    def _end(self, num_ranks: int) -> None:
        self._waits_for_end = False
        accumulate(self.wait(), num_ranks)


class Shards:
    """The shards of one module's parameters.

    Attributes:
        parameters: The shards by name within the module, each ``[c]``; an optimizer updates them.
        specs: The full tensors, in the shards' dtypes.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        cut: dict[int, nn.Parameter],
        group: dist.ProcessGroup | None,
        compression: Compression,
        in_flight: Arrivals,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        """Cuts this rank's shards of full parameters, by name within the module.

        ``cut`` has the shards made so far, by the id of the full parameter, and is updated: modules may share one.
        ``in_flight`` are the reduce-scatters of all units. Floating-point parameters are gathered in ``compute_dtype``,
        and gradients summed in ``reduce_dtype``; in their own, and their shard's, if None.
        """
        self.num_ranks = dist.get_world_size(group)
        self._group, self._compression, self._in_flight = group, compression, in_flight
        for parameter in params.values():
            if id(parameter) not in cut:
                shard = local_shard(parameter.detach(), self.num_ranks, dist.get_rank(group)).clone()
                cut[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        self.parameters = {name: cut[id(parameter)] for name, parameter in params.items()}
        self.specs = {name: tensor_spec(name, parameter) for name, parameter in params.items()}
        self.compute_plan = self._plan(list(params), compute_dtype)
        self.reduce_plan = self._plan([name for name, p in params.items() if p.requires_grad], reduce_dtype)
        self._gathered: tuple[tuple[int, ...], dict[str, torch.Tensor]] | None = None

    def gather(self, plan: BucketPlan | None = None) -> dict[str, torch.Tensor]:
        """All-gathers the shards, in the buckets of a plan; those of the compute dtype if None.

        Returns:
            Full tensors by name, without padding.
        """
        full = {}
        for bucket in (plan or self.compute_plan).buckets:
            dtype = getattr(torch, bucket.dtype)
            row = pack_local_shards(
                bucket, {t.name: self.parameters[t.name].detach().to(dtype) for t in bucket.tensors}
            )
            if self.communicates:
                full.update(unpack_chunks(bucket, all_gather(row, self._group).view(self.num_ranks, -1)))
            else:
                full.update(unpack_chunks(bucket, row.repeat(self.num_ranks, 1)))
        for name, spec in self.specs.items():
            if not spec.num_elements:
                full[name] = self.parameters[name].detach().new_empty(spec.shape)
        return full

    def gather_again(self, versions: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """All-gathers the shards for the backward; the result is kept until the unit's gradients are reduced.

        Raises:
            RuntimeError: If a shard has changed since the forward.
        """
        if versions != self.versions:
            raise RuntimeError(f"shards of {list(self.specs)} were changed between the forward and its backward")
        if self._gathered is not None and self._gathered[0] == versions:
            return self._gathered[1]
        full = self.gather()
        self._gathered = (versions, full) if self.reduce_plan.buckets else None
        return full

    def gather_masters(self) -> dict[str, torch.Tensor]:
        """All-gathers the shards in their own dtypes; see ``gather``."""
        return self.gather(self._plan(list(self.specs), None))

    def scatter(self, grads: dict[str, torch.Tensor | None]) -> None:
        """Starts the reduce-scatters of full gradients, None if not used, and frees the gathered parameters."""
        self.drop()
        some = next((grad for grad in grads.values() if grad is not None), None)
        if some is None:
            return
        self._in_flight.begin(self.num_ranks)
        for bucket in self.reduce_plan.buckets:
            shape = (self.num_ranks, bucket_width(bucket, self.num_ranks))
            buffer = torch.empty(shape, dtype=getattr(torch, bucket.dtype), device=some.device)
            tensors = {tensor.name: _dense(tensor, grads[tensor.name], some) for tensor in bucket.tensors}
            pack_chunks(bucket, tensors, self.num_ranks, out=buffer)
            if self.num_ranks > 1:
                row, work = self._compression.reduce(buffer, self._group, True, REDUCE_SCATTER)
            else:
                row, work = buffer[0], None
            shards = {tensor.name: self.parameters[tensor.name] for tensor in bucket.tensors}
            accumulate(self._in_flight.add(work, (bucket, shards, row), buffer), self.num_ranks)

    def drop(self) -> None:
        """Frees the tensors gathered for the backward."""
        self._gathered = None

    @property
    def versions(self) -> tuple[int, ...]:
        """Version counters of the shards, which in-place changes increment."""
        return tuple(parameter._version for parameter in self.parameters.values())

    @property
    def communicates(self) -> bool:
        """Whether this unit communicates: there are several ranks, and the compression is not ``noop``."""
        return self.num_ranks > 1 and self._compression.sends

    def num_bytes(self, plan: BucketPlan) -> list[int]:
        """Bytes of the full buffer of each bucket of a plan."""
        return [
            self.num_ranks * bucket_width(bucket, self.num_ranks) * dtype_bytes(bucket.dtype) for bucket in plan.buckets
        ]

    def _plan(self, names: Sequence[str], dtype: torch.dtype | None) -> BucketPlan:
        """Plans one bucket for each dtype; floating-point tensors are sent in ``dtype`` if it is given."""
        specs = [self.specs[name] for name in names]
        if dtype is not None:
            dtype_name = str(dtype).removeprefix("torch.")
            is_float = {name: parameter.is_floating_point() for name, parameter in self.parameters.items()}
            specs = [spec._replace(dtype=dtype_name) if is_float[spec.name] else spec for spec in specs]
        return plan_buckets(specs, None)


class Gather(torch.autograd.Function):
    """Shards to full parameters: ``Gather.apply(shards, *shards.parameters.values())``."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All-gathers the shards; gives the full parameters in the order of ``shards.parameters``."""
        full = shards.gather()
        ctx.shards = shards
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(full[name] for name, p in shards.parameters.items() if not p.requires_grad))
        return tuple(full[name].data for name in shards.parameters)  # autograd refuses other views when they change

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Starts to reduce-scatter the full gradients; autograd gets none, ``accumulate`` adds them to the shards."""
        ctx.shards.scatter(dict(zip(ctx.shards.parameters, grads, strict=True)))
        return (None,) * (1 + len(grads))


def accumulate(arrived: list[Arrival], num_ranks: int) -> None:
    """Adds reduced gradients to ``shard.grad``, the sum of those since the last synchronisation.

    The mean that the last synchronisation left in ``shard.grad`` is set aside first: it must not be divided again.
    """
    for bucket, shards, row in arrived:
        for name, grad in split_chunks(bucket, row, num_ranks).items():
            shard: Any = shards[name]
            master = grad.data.to(shard.dtype)  # with a version of its own, not the bucket's
            if num_ranks > 1:
                master = master.as_subclass(PartialGradient)
            take_finished(shard)
            shard.grad = master if shard.grad is None else shard.grad.add_(master)
            if shard._aside is not None:
                shard._sum = id(shard.grad), shard.grad._version


def take_finished(shard: Any) -> None:
    """Sets the mean that the last synchronisation left in ``shard.grad`` aside, so that it is not divided again.

    Raises:
        RuntimeError: If the sum was changed since, which would miss what is aside.
    """
    aside = getattr(shard, "_aside", None)
    if shard.grad is None:
        aside = None  # the gradient was cleared
    elif shard.grad is getattr(shard, "_finished", None):
        aside, shard.grad = shard.grad, None
    elif aside is not None and shard._sum != (id(shard.grad), shard.grad._version):
        raise RuntimeError(
            "a gradient was changed after a backward that adds to synchronised ones: change gradients after"
            " finish_gradient_synchronization, or drop all of them by zero_grad()"
        )
    shard._aside, shard._finished = aside, None


def put_back(shard: Any, num_ranks: int) -> None:
    """Adds the mean that ``take_finished`` set aside to the new one."""
    aside = getattr(shard, "_aside", None)
    if aside is not None:
        shard.grad.add_(aside)
    if num_ranks > 1:
        shard.grad = shard.grad.as_subclass(PartialGradient)
    shard._aside, shard._finished = None, shard.grad


def _dense(tensor: TensorSpec, grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return like.new_zeros(tensor.shape)
    check_dense(tensor.name, grad)
    return grad
