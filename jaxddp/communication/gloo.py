"""Collectives of shards between processes on CPUs, where XLA's are wrong or slow over Gloo.

**Wrong.** XLA's reduce-scatter: Gloo's routine sends from a buffer while it writes this rank's result to the front of
that buffer. If a chunk is larger than a socket's buffer, rank 0 may receive another rank's result as its part of the
sum, without any error, and the call times out if ranks arrive 30 seconds apart. Seen with jaxlib 0.10. An all-to-all of
the chunks, summed by the receiver, sends the same bytes, is correct and takes half as long on loopback.

**Slow.** All that two processes exchange takes one connection, and Gloo sends no data before the peer has announced its
receive there. What posts its send first makes the later rank's announcement wait behind its data, so that the link's
directions take turns. For D bytes each way at a rate of W, an all-to-all and a collective-permute take 2 D/W, an
all-gather, which posts two halves, 1.5 D/W, and an all-reduce of D bytes, which posts receives first, D/W.

Among two ranks, an exchange is therefore an all-reduce (``swap``): as integers, the sum minus a rank's own words is
what the other has sent, bit for bit. Among more ranks a ring's neighbours have connections of their own. Plans list the
collective that is used.

References:
    https://github.com/jax-ml/jax/issues/40830 and https://github.com/jax-ml/jax/issues/40831
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_WORD = jnp.uint32


def swapped_bytes(num_elements: int, dtype_bytes: int) -> int:
    """Bytes of the all-reduce by which two ranks swap so many elements each, in words of 4 bytes."""
    return -(-num_elements * dtype_bytes // 4) * 4


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def swap(x: jax.Array, axis: Any) -> jax.Array:
    """Gives each of two ranks the other's array, by an all-reduce of as many bytes.

    Both sum their bits as unsigned 32-bit integers, which wrap around, and take their own off. On a ring, an all-reduce
    of S bytes sends 2 (N-1)/N S: S from each of two ranks, as an exchange does.
    """
    words = _words(x)
    return _from_words(lax.psum(words, axis) - words, x)


swap.defvjp(lambda x, axis: (swap(x, axis), None), lambda axis, _, gradient: (swap(gradient, axis),))


def scatter_by_swap(x: jax.Array, axis: str) -> jax.Array:
    """Sums ``[2 k, ...]`` over two ranks, at least in float32; rank r gets part r, ``[k, ...]``."""
    chunks, rank = x.reshape(2, -1, *x.shape[1:]), lax.axis_index(axis)
    kept, sent = (lax.dynamic_index_in_dim(chunks, chunk, keepdims=False) for chunk in (rank, 1 - rank))
    summed = _summed_dtype(x.dtype)
    return (kept.astype(summed) + swap(sent, axis).astype(summed)).astype(x.dtype)


def all_to_all_by_swap(x: jax.Array, axis: Any) -> jax.Array:
    """Sends row o of ``[2, ...]`` to rank o; row r of the result is from rank r."""
    rank = lax.axis_index(axis)
    received = swap(lax.dynamic_index_in_dim(x, 1 - rank, keepdims=False), axis)
    return lax.dynamic_update_index_in_dim(x, received, 1 - rank, axis=0)


def gather_by_swap(x: jax.Array, axis: Any) -> jax.Array:
    """Concatenates two ranks' ``[k, ...]`` to ``[2 k, ...]``."""
    received, is_first = swap(x, axis), lax.axis_index(axis) == 0
    return jnp.concatenate([jnp.where(is_first, x, received), jnp.where(is_first, received, x)])


def scatter_by_all_to_all(x: jax.Array, axis: str) -> jax.Array:
    """Sums ``[N k, ...]`` over the ranks, at least in float32, in rank order; rank r gets part r, ``[k, ...]``."""
    chunks = x.reshape(lax.axis_size(axis), -1, *x.shape[1:])
    received = lax.all_to_all(chunks, axis, split_axis=0, concat_axis=0)
    return jnp.sum(received, axis=0, dtype=_summed_dtype(x.dtype)).astype(x.dtype)


def _summed_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as ``[words]``, padded with zeros."""
    flat = x.reshape(-1).astype(jnp.uint8) if x.dtype == jnp.bool_ else x.reshape(-1)
    per_word = _WORD.dtype.itemsize // flat.dtype.itemsize
    if per_word > 1:
        flat = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
    return lax.bitcast_convert_type(flat, _WORD).reshape(-1)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    dtype = jnp.dtype(jnp.uint8) if like.dtype == jnp.bool_ else like.dtype
    per_element = dtype.itemsize // _WORD.dtype.itemsize
    grouped = words.reshape(-1, per_element) if per_element > 1 else words
    flat = lax.bitcast_convert_type(grouped, dtype).reshape(-1)
    return flat[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)
