"""Communication hooks: how ``bucketed`` sums a bucket over ranks, as in PyTorch's DDP.

A hook is a function ``(buffer, axis) -> the buffer's sum over the ranks``, of the same shape and dtype, without state.
``bf16`` keeps 8 bits of each summand and of the sum; ``fp16`` 11 bits, and means from 6e-8 to 65504.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .collectives import Axis

Hook = Callable[[jax.Array, Axis], jax.Array]


def bf16(buffer: jax.Array, axis: Axis) -> jax.Array:
    """Sums in bfloat16."""
    return lax.psum(buffer.astype(jnp.bfloat16), axis).astype(buffer.dtype)


def fp16(buffer: jax.Array, axis: Axis) -> jax.Array:
    """Sums in float16, divided by the number of ranks first: a sum above 65504 is infinite."""
    num_ranks = lax.axis_size(axis)
    return lax.psum((buffer / num_ranks).astype(jnp.float16), axis).astype(buffer.dtype) * num_ranks
