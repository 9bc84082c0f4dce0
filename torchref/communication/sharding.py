"""How tensors are cut into shards: tensor by tensor, one chunk a rank.

A tensor is flattened, padded with zeros to a multiple of the number of ranks N, and rank r owns chunk r. Chunks
of many tensors are communicated together: row r of a bucket's buffer holds rank r's chunks.

    tensor  [n]         padded to [N c], c = ceil(n / N)           chunk r = elements r c ... (r + 1) c
    bucket  [N, width]  row r = chunk r of each of its tensors     width = sum of their c
    scatter [width]     = reduce-scatter of [N, width] along dimension 0
    gather  [N, width]  = all-gather of [width]

If a tensor has fewer than N elements, the last ranks hold padding only; if it has none, all chunks are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from jaxddp.communication.buckets import Bucket, bucket_width, chunk_elements


def pack_chunks(
    bucket: Bucket, tensors: Mapping[str, torch.Tensor], num_ranks: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Packs the chunks of a bucket's tensors, rank by rank.

    ``out`` is a buffer of ``[num_ranks, width]`` to write into, of any dtype.

    Returns:
        A buffer of shape ``[num_ranks, width]``, of which rank r owns row r. Without ``out``, a bucket of one tensor
        that needs no padding gives a view of it.
    """
    first = tensors[bucket.tensors[0].name]
    if out is None:
        if len(bucket.tensors) == 1 and first.numel() % num_ranks == 0:
            return first.reshape(num_ranks, first.numel() // num_ranks)
        out = first.new_empty(num_ranks, bucket_width(bucket, num_ranks))
    for name, columns in split_chunks(bucket, out, num_ranks).items():
        _write(tensors[name], columns)
    return out


def pack_local_shards(bucket: Bucket, chunks: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Concatenates one rank's chunks of a bucket's tensors.

    Returns:
        A buffer of shape ``[width]``; for a bucket of one tensor, its chunk.
    """
    parts = [chunks[tensor.name] for tensor in bucket.tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack_chunks(
    bucket: Bucket, buffer: torch.Tensor, out: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Undoes ``pack_chunks``.

    ``out`` holds full tensors by name to write into, at least those of the bucket.

    Returns:
        Full tensors by name, without padding. Without ``out``, a bucket of one tensor gives a view.
    """
    found = {}
    for tensor, columns in zip(bucket.tensors, split_chunks(bucket, buffer, buffer.shape[0]).values(), strict=True):
        if out is None:
            found[tensor.name] = columns.reshape(-1)[: tensor.num_elements].view(tensor.shape)
        else:
            found[tensor.name] = out[tensor.name]
            _read(columns, out[tensor.name])
    return found


def split_chunks(bucket: Bucket, buffer: torch.Tensor, num_ranks: int) -> dict[str, torch.Tensor]:
    """Splits one rank's row of a bucket into chunks, or all ranks' rows.

    Returns:
        Views by name, each of shape ``[c]``, or ``[num_ranks, c]``.
    """
    chunks = [chunk_elements(tensor.num_elements, num_ranks) for tensor in bucket.tensors]
    return dict(zip((tensor.name for tensor in bucket.tensors), buffer.split(chunks, dim=-1), strict=True))


def local_shard(tensor: torch.Tensor, num_ranks: int, rank: int) -> torch.Tensor:
    """Cuts out a rank's chunk of a tensor.

    Returns:
        The chunk, of shape ``[c]``; a view of a contiguous tensor, unless it needs padding.

    Example:
        >>> local_shard(torch.tensor([[1, 2], [3, 4]]), 3, 0), local_shard(torch.tensor(5), 3, 1)
        (tensor([1, 2]), tensor([0]))
    """
    chunk = chunk_elements(tensor.numel(), num_ranks)
    part = tensor.reshape(-1)[rank * chunk : (rank + 1) * chunk]
    return part if len(part) == chunk else torch.cat([part, part.new_zeros(chunk - len(part))])


def _write(tensor: torch.Tensor, columns: torch.Tensor) -> None:
    """Writes a tensor, and zeros for padding, into the columns ``[N, c]`` of its chunks."""
    for part, place in _pairs(tensor.reshape(-1), columns):
        place.copy_(part)
    num_full, rest = divmod(tensor.numel(), columns.shape[1] or 1)
    columns[num_full : num_full + 1, rest:].zero_()
    columns[num_full + 1 :].zero_()


def _read(columns: torch.Tensor, tensor: torch.Tensor) -> None:
    """Writes the columns ``[N, c]`` of a tensor's chunks into it."""
    if not tensor.is_contiguous():
        tensor.copy_(columns.reshape(-1)[: tensor.numel()].view(tensor.shape))
        return
    for part, place in _pairs(tensor.view(-1), columns):
        part.copy_(place)


def _pairs(flat: torch.Tensor, columns: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of a flat tensor and of its place in the columns: the full rows, then the remainder."""
    chunk = columns.shape[1]
    num_full, rest = divmod(len(flat), chunk) if chunk else (0, 0)
    if num_full:
        yield flat[: num_full * chunk].view(num_full, chunk), columns[:num_full]
    if rest:
        yield flat[num_full * chunk :], columns[num_full, :rest]
