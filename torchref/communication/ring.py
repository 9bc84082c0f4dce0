"""The ring algorithms, built from sends to the right-hand neighbour only: the twin of `jaxddp.communication.ring`.

N is the number of ranks, S the bytes of the full tensor:

| function            | steps = sends | bytes sent per rank       |
|---------------------|---------------|---------------------------|
| ring_reduce_scatter | N - 1         | (N-1)/N S                 |
| ring_all_gather     | N - 1         | (N-1)/N S                 |
| ring_all_reduce     | 2 (N-1)       | 2 (N-1)/N S, S padded     |

Each send is waited for before the next. Sums are formed in ring order, in the dtype of the tensor. All three return a
new tensor.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from jaxddp.communication.buckets import length_of_chunk

from .collectives import send_recv


def ring_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sums ``[N k, ...]`` over the ranks in N - 1 steps; rank r gets part r of the sum, ``[k, ...]``.

    A rank adds its own part to the chunk it receives and passes it on. Chunk c starts on rank c + 1 and ends on rank c.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = tensor.detach().reshape(num_ranks, length_of_chunk(tensor.shape, num_ranks), *tensor.shape[1:])

    def local_chunk(chunk: int) -> Tensor:
        return chunks[chunk % num_ranks]

    partial_sum = local_chunk(rank - 1).clone()
    for step in range(1, num_ranks):
        partial_sum = send_recv(partial_sum, _to_the_right(num_ranks), group) + local_chunk(rank - 1 - step)
    return partial_sum


def ring_all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Concatenates the ranks' ``[k, ...]`` along dimension 0 in N - 1 steps; every rank gets ``[N k, ...]``.

    A rank keeps a copy of the chunk it receives and passes it on.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    chunk_length = length_of_chunk(tensor.shape, 1)
    chunk = tensor.detach()
    chunks = tensor.new_zeros(num_ranks, *tensor.shape)
    chunks[rank] = chunk
    for step in range(1, num_ranks):
        chunk = send_recv(chunk, _to_the_right(num_ranks), group)
        chunks[(rank - step) % num_ranks] = chunk
    return chunks.reshape(num_ranks * chunk_length, *tensor.shape[1:])


def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sums over the ranks in 2 (N-1) steps; every rank gets the full sum.

    The tensor is flattened and padded with zeros until N divides its length, and both are undone at the end.
    """
    num_ranks = dist.get_world_size(group)
    padded = pad(tensor.detach().reshape(-1), (0, -tensor.numel() % num_ranks))
    total = ring_all_gather(ring_reduce_scatter(padded, group), group)
    return total[: tensor.numel()].reshape(tensor.shape)


def _to_the_right(num_ranks: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
