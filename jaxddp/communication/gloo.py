"""Collectives of shards between processes on CPUs, where XLA's are wrong or slow over Gloo.

**Wrong.** XLA's reduce-scatter, with jaxlib 0.10: Gloo sends from a buffer while it writes this rank's result to its
front. If a chunk is larger than a socket's buffer, rank 0 may receive another rank's result as its part of the sum,
without any error. An all-to-all of the chunks, summed by the receiver, sends the same bytes and is correct.

**Slow.** On the one connection of two processes, Gloo sends no data before the peer has announced its receive. What
posts its send first makes the later rank's announcement wait behind its data, so the link's directions take turns: an
all-to-all and a collective-permute take twice, an all-gather 1.5 times as long as an all-reduce, which posts receives
first. So two ranks exchange by an all-reduce (``swap``).

References:
    https://github.com/jax-ml/jax/issues/40830 and https://github.com/jax-ml/jax/issues/40831
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def swap(x: jax.Array, axis: Any) -> jax.Array:
    """Gives each of two ranks the other's array: both sum their bits as unsigned integers, and take their own off."""
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    return (lax.psum(bits, axis) - bits).view(x.dtype)


swap.defvjp(lambda x, axis: (swap(x, axis), None), lambda axis, _, gradient: (swap(gradient, axis),))


def all_to_all(rows: jax.Array, axis: Any) -> jax.Array:
    """Sends row o of ``[N, ...]`` to rank o; row r of the result is from rank r. Two ranks swap."""
    if len(rows) > 2:
        return lax.all_to_all(rows, axis, split_axis=0, concat_axis=0)
    rank = lax.axis_index(axis)
    received = swap(lax.dynamic_index_in_dim(rows, 1 - rank, keepdims=False), axis)
    return lax.dynamic_update_index_in_dim(rows, received, 1 - rank, axis=0)


def reduce_scatter(x: jax.Array, axis: str) -> jax.Array:
    """Sums ``[N k, ...]`` over the ranks, at least in float32, in rank order; rank r gets part r, ``[k, ...]``."""
    received = all_to_all(x.reshape(lax.axis_size(axis), -1, *x.shape[1:]), axis)
    dtype = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.sum(received, axis=0, dtype=dtype).astype(x.dtype)
