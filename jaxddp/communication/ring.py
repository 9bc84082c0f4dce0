"""The ring algorithms, built from sends to the right-hand neighbour only.

The array of S bytes is cut into N chunks; in each step every rank sends one to rank + 1 and receives one from rank - 1:

| function            | steps = sends | bytes sent per rank       |
|---------------------|---------------|---------------------------|
| ring_reduce_scatter | N - 1         | (N-1)/N S                 |
| ring_all_gather     | N - 1         | (N-1)/N S                 |
| ring_all_reduce     | 2 (N-1)       | 2 (N-1)/N S, S padded     |

Each send is a collective-permute. Sums are formed in ring order, in the dtype of the array; under ``check_vma=True``
the results count as different on every rank.

References:
    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .buckets import length_of_chunk
from .collectives import send_recv


def ring_reduce_scatter(x: jax.Array, axis: str) -> jax.Array:
    """Sums ``[N k, ...]`` over the ranks in N - 1 steps; rank r gets part r of the sum, ``[k, ...]``."""
    num_ranks, rank = lax.axis_size(axis), lax.axis_index(axis)
    chunks = x.reshape(num_ranks, length_of_chunk(x.shape, num_ranks), *x.shape[1:])

    def local_chunk(chunk: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(chunks, chunk % num_ranks, keepdims=False)

    partial_sum = local_chunk(rank - 1)  # chunk c starts on rank c + 1 and ends on rank c
    for step in range(1, num_ranks):
        partial_sum = send_recv(partial_sum, axis, _to_the_right(num_ranks)) + local_chunk(rank - 1 - step)
    return partial_sum


def ring_all_gather(x: jax.Array, axis: str) -> jax.Array:
    """Concatenates the ranks' ``[k, ...]`` along dimension 0 in N - 1 steps; every rank gets ``[N k, ...]``."""
    num_ranks, rank = lax.axis_size(axis), lax.axis_index(axis)
    chunk, chunk_length = x, length_of_chunk(x.shape, 1)
    chunks = lax.dynamic_update_index_in_dim(jnp.zeros((num_ranks, *x.shape), x.dtype), chunk, rank, axis=0)
    for step in range(1, num_ranks):
        chunk = send_recv(chunk, axis, _to_the_right(num_ranks))
        chunks = lax.dynamic_update_index_in_dim(chunks, chunk, (rank - step) % num_ranks, axis=0)
    return chunks.reshape(num_ranks * chunk_length, *x.shape[1:])


def ring_all_reduce(x: jax.Array, axis: str) -> jax.Array:
    """Sums over the ranks in 2 (N-1) steps, flat and padded with zeros; every rank gets the full sum, of its shape."""
    num_ranks = lax.axis_size(axis)
    padded = jnp.pad(x.reshape(-1), (0, -x.size % num_ranks))
    total = ring_all_gather(ring_reduce_scatter(padded, axis), axis)
    return total[: x.size].reshape(x.shape)


def _to_the_right(num_ranks: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
