"""The gather of a unit's shards as a differentiable operation: its transpose is the reduce-scatter of the gradients.

    forward   full [shape] = unpack(all-gather of [width])              in the compute dtype
    backward  shard.grad [c] += row r of the sum over ranks of d full   in the reduction's dtype, then the shard's own

The gradient is not handed to autograd: it is in flight when the backward goes on, and is added when it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jaxddp.planning.buckets import Bucket, BucketPlan, TensorSpec, bucket_width, dtype_bytes, plan_buckets

from ..communication.collectives import all_gather
from ..communication.compression import Compression
from ..communication.exchange import SHARDED, InFlight
from ..communication.sharding import own_chunk, pack_chunks, pack_own, split_chunks, unpack_chunks
from ..strategy import check_dense, tensor_spec

Arrival = tuple[Bucket, dict[str, nn.Parameter], torch.Tensor]  # the bucket's shards by name, and the sum's own row


class Shards:
    """One module's parameters in shards.

    Attributes:
        parameters: The shards by name within the module, each ``[c]``; what an optimizer updates.
        specs: The whole tensors, in the shards' dtypes.
    """

    def __init__(
        self,
        whole: dict[str, nn.Parameter],
        cut: dict[int, nn.Parameter],
        group: dist.ProcessGroup | None,
        compression: Compression,
        in_flight: InFlight[Arrival],
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        """Cuts this rank's shards.

        Args:
            whole: Parameters by name within the module.
            cut: Shards of what was cut before, by the id of the whole, for parameters that modules share; added to.
            group: The ranks.
            compression: What of the gradients travels.
            in_flight: The gradients under way, of all units.
            compute_dtype: What floating-point parameters are gathered in; their own if None.
            reduce_dtype: What gradients are summed in; their shard's if None.
        """
        self.num_ranks = dist.get_world_size(group)
        self._group, self._compression, self._in_flight = group, compression, in_flight
        for parameter in whole.values():
            if id(parameter) not in cut:
                chunk = own_chunk(parameter.detach(), self.num_ranks, dist.get_rank(group)).clone()
                cut[id(parameter)] = nn.Parameter(chunk, requires_grad=parameter.requires_grad)
        self.parameters = {name: cut[id(parameter)] for name, parameter in whole.items()}
        self.specs = {name: tensor_spec(name, parameter) for name, parameter in whole.items()}
        self.compute_plan = self._plan(list(whole), compute_dtype)
        self.reduce_plan = self._plan([name for name, p in whole.items() if p.requires_grad], reduce_dtype)
        self._again: tuple[tuple[int, ...], dict[str, torch.Tensor]] | None = None

    def gather(self, plan: BucketPlan | None = None) -> dict[str, torch.Tensor]:
        """Puts the ranks' shards together.

        Args:
            plan: What travels together, and in which dtypes; the compute dtype's if None.

        Returns:
            Whole tensors by name, without padding.
        """
        full = {}
        for bucket in (plan or self.compute_plan).buckets:
            dtype = getattr(torch, bucket.dtype)
            own = pack_own(bucket, {t.name: self.parameters[t.name].detach().to(dtype) for t in bucket.tensors})
            if self.communicates:
                full.update(unpack_chunks(bucket, all_gather(own, self._group).view(self.num_ranks, -1)))
            else:
                full.update(unpack_chunks(bucket, own.repeat(self.num_ranks, 1)))
        for name, spec in self.specs.items():
            if not spec.num_elements:
                full[name] = self.parameters[name].detach().new_empty(spec.shape)
        return full

    def gather_again(self, versions: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Puts the ranks' shards together for the backward; what is trained is kept until its gradients leave.

        Args:
            versions: What ``versions`` was in the forward.

        Returns:
            As ``gather``.

        Raises:
            RuntimeError: If a shard has been changed since.
        """
        if versions != self.versions:
            raise RuntimeError(f"shards of {list(self.specs)} were changed between the forward and its backward")
        if self._again is not None and self._again[0] == versions:
            return self._again[1]
        full = self.gather()
        self._again = (versions, full) if self.reduce_plan.buckets else None
        return full

    def gather_masters(self) -> dict[str, torch.Tensor]:
        """Puts the ranks' shards together in their own dtypes."""
        return self.gather(self._plan(list(self.specs), None))

    def scatter(self, grads: dict[str, torch.Tensor | None]) -> None:
        """Launches the sums of gradients.

        Args:
            grads: Gradients of the whole tensors by name; None for one that took no part.
        """
        self.drop()
        some = next((grad for grad in grads.values() if grad is not None), None)
        if some is None:
            return
        for bucket in self.reduce_plan.buckets:
            shape = (self.num_ranks, bucket_width(bucket, self.num_ranks))
            buffer = torch.empty(shape, dtype=getattr(torch, bucket.dtype), device=some.device)
            tensors = {tensor.name: _dense(tensor, grads[tensor.name], some) for tensor in bucket.tensors}
            pack_chunks(bucket, tensors, self.num_ranks, out=buffer)
            if self.num_ranks > 1:
                own, work = self._compression.travel(buffer, self._group, True, SHARDED)
            else:
                own, work = buffer[0], None
            shards = {tensor.name: self.parameters[tensor.name] for tensor in bucket.tensors}
            accumulate(self._in_flight.add(work, (bucket, shards, own), buffer), self.num_ranks)

    def drop(self) -> None:
        """Drops what was gathered for the backward."""
        self._again = None

    @property
    def versions(self) -> tuple[int, ...]:
        """Changes when a shard is changed."""
        return tuple(parameter._version for parameter in self.parameters.values())

    @property
    def communicates(self) -> bool:
        """Whether anything travels."""
        return self.num_ranks > 1 and self._compression.sends

    def num_bytes(self, plan: BucketPlan) -> list[int]:
        """Bytes of the full buffers of a plan."""
        return [
            self.num_ranks * bucket_width(bucket, self.num_ranks) * dtype_bytes(bucket.dtype) for bucket in plan.buckets
        ]

    def _plan(self, names: Sequence[str], dtype: torch.dtype | None) -> BucketPlan:
        """One bucket, if all are of one dtype."""
        specs = [self.specs[name] for name in names]
        if dtype is not None:
            of_dtype = str(dtype).removeprefix("torch.")
            is_float = {name: parameter.is_floating_point() for name, parameter in self.parameters.items()}
            specs = [spec._replace(dtype=of_dtype) if is_float[spec.name] else spec for spec in specs]
        return plan_buckets(specs, None)


class Gather(torch.autograd.Function):
    """``apply(shards, *shards.parameters.values()) -> the whole tensors``, in that order."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gathers."""
        full = shards.gather()
        ctx.shards = shards
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(full[name] for name, p in shards.parameters.items() if not p.requires_grad))
        return tuple(full[name] for name in shards.parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Scatters."""
        ctx.shards.scatter(dict(zip(ctx.shards.parameters, grads, strict=True)))
        return (None,) * (1 + len(grads))


def accumulate(arrived: list[Arrival], num_ranks: int) -> None:
    """Adds gradients that have arrived to those of the shards."""
    for bucket, shards, own in arrived:
        for name, grad in split_chunks(bucket, own, num_ranks).items():
            shard = shards[name]
            master = grad.to(shard.dtype)
            shard.grad = master if shard.grad is None else shard.grad.add_(master)


def _dense(tensor: TensorSpec, grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return like.new_zeros(tensor.shape)
    check_dense(tensor.name, grad)
    return grad
