"""How tensors are cut into shards: rank r of N holds part r of each; the twin of ``jaxddp.communication.sharding``.

A tensor of n elements is flattened and padded with zeros to N chunks of c = ceil(n / N), where jaxddp cuts along a
dimension if it can; the bytes are the same. A shard has as many dimensions as its tensor, and at least one, so that
parameter groups chosen by ``p.dim()`` are the same on shards: ``[1, c]`` of a matrix. Row r of a bucket's buffer
``[N, width]`` holds the shards of rank r.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from jaxddp.communication.buckets import Bucket, bucket_width, chunk_elements, dtype_bytes

from .collectives import all_gather


class Cut(NamedTuple):
    """How a tensor of ``shape`` is cut.

    Example:
        >>> Cut((3, 5), 4).shard_shape, Cut((), 4).shard_shape
        ((1, 4), (1,))
    """

    shape: tuple[int, ...]
    num_ranks: int

    @property
    def chunk(self) -> int:
        """Number of elements of a shard, with padding."""
        return chunk_elements(math.prod(self.shape), self.num_ranks)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        return (*(1,) * (len(self.shape) - 1), self.chunk)

    def to_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cuts a full tensor into the flat shards of all ranks, ``[N, chunk]``; a view where it can be one."""
        padding = self.num_ranks * self.chunk - tensor.numel()
        flat = tensor.reshape(-1)
        return (pad(flat, (0, padding)) if padding else flat).view(self.num_ranks, self.chunk)

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Undoes ``to_rows``; a view where it can be one."""
        return rows.reshape(-1)[: math.prod(self.shape)].view(self.shape)

    def local_shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Cuts out a rank's shard of a full tensor; a view where it can be one."""
        return self.to_rows(tensor)[rank].view(self.shard_shape)


def gather_whole(shard: torch.Tensor, how: Cut, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All-gathers a tensor of which each rank of a group has its shard; every rank calls it."""
    flat = shard.detach().as_subclass(torch.Tensor).reshape(-1)
    return how.from_rows(all_gather(flat, group).view(how.num_ranks, -1))


def num_bytes(bucket: Bucket, num_ranks: int) -> int:
    """Bytes of a bucket's buffer of all ranks' shards."""
    return num_ranks * bucket_width(bucket, num_ranks) * dtype_bytes(bucket.dtype)


def pack_rows(bucket: Bucket, tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]) -> torch.Tensor:
    """Packs tensors into ``[N, width]``, where row r holds the shards of rank r; may be a view of an only tensor."""
    rows = [cuts[tensor.name].to_rows(tensors[tensor.name]) for tensor in bucket.tensors]
    return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).to(getattr(torch, bucket.dtype))


def unpack_rows(bucket: Bucket, rows: torch.Tensor, cuts: Mapping[str, Cut]) -> dict[str, torch.Tensor]:
    """Undoes ``pack_rows``: full tensors by name, views where they can be."""
    return {name: cuts[name].from_rows(part) for name, part in _split(bucket, rows, cuts).items()}


def pack_row(bucket: Bucket, shards: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Packs one rank's shards of the tensors of a bucket into ``[width]``; a view of the only one."""
    flat = [shards[tensor.name].reshape(-1) for tensor in bucket.tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpack_row(bucket: Bucket, row: torch.Tensor, cuts: Mapping[str, Cut]) -> dict[str, torch.Tensor]:
    """Undoes ``pack_row``: views of one rank's shards, by name."""
    return {name: part.view(cuts[name].shard_shape) for name, part in _split(bucket, row, cuts).items()}


Parts = Collection[tuple[str, torch.Tensor]]  # names, and this rank's shard of the sum


class ShardSums:
    """Reduce-scatters in flight, and what has arrived of them: sums over ranks and over backwards, by name."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Any, torch.Tensor | None, Parts]] = deque()
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, parts: Parts, work: Any = None, buffer: torch.Tensor | None = None) -> None:
        """Adds what a reduce-scatter of ``buffer`` writes, or what is there already; parts of one name add up."""
        self._queue.append((work, buffer, parts))
        self.wait(num_left=2)  # no more, because their buffers must stay allocated

    def wait(self, num_left: int = 0) -> None:
        """Waits for all but the newest."""
        while len(self._queue) > num_left:
            work, _, parts = self._queue.popleft()
            if work is not None:
                work.wait()
            for name, part in parts:
                self._sums[name] = self._sums[name].add_(part) if name in self._sums else part

    def means(self, denominator: Any) -> dict[str, torch.Tensor]:
        """Waits for all, and divides; the next sums start from nothing."""
        self.wait()
        means, self._sums = self._sums, {}
        if means:
            torch._foreach_div_(list(means.values()), denominator)
        return means

    def forget(self, name: str | None = None) -> None:
        """Drops what has arrived of one, or everything; the library keeps memory in flight until it is done."""
        if name is not None:
            self._sums.pop(name, None)
        else:
            self._queue.clear()
            self._sums = {}


def _split(bucket: Bucket, buffer: torch.Tensor, cuts: Mapping[str, Cut]) -> dict[str, torch.Tensor]:
    names = [tensor.name for tensor in bucket.tensors]
    return dict(zip(names, buffer.split([cuts[name].chunk for name in names], dim=-1), strict=True))
