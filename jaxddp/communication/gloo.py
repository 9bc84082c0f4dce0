"""A reduce-scatter for processes on CPUs (Gloo), where XLA's may give wrong sums.

Gloo's routine sends from a buffer while it writes this rank's result to the front of that buffer. If a chunk is larger
than a socket's buffer, rank 0 may receive another rank's result as its part of the sum, without any error: one call in
ten with two processes, chunks of 12 MiB and ranks that arrive at different times. It also times out if ranks arrive 30
seconds apart, whatever timeout XLA was given. Seen with jaxlib 0.10.

An all-to-all of the chunks, summed by the receiver, sends the same bytes and is correct. On loopback it took half as
long. Plans list the collective that is used.

References:
    https://github.com/jax-ml/jax/issues/40830 and https://github.com/jax-ml/jax/issues/40831
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def kind_of_scatter(platform: str) -> str:
    """The collective that implements a reduce-scatter here: ``"reduce-scatter"``, or ``"all-to-all"`` over Gloo."""
    return "all-to-all" if platform == "cpu" and jax.distributed.is_initialized() else "reduce-scatter"


def traced_platform() -> str:
    """The platform of the mesh that is being traced for, or else of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def scatter_by_all_to_all(x: jax.Array, axis: str) -> jax.Array:
    """Sums ``[N k, ...]`` over the ranks, at least in float32, in rank order; rank r gets part r, ``[k, ...]``."""
    chunks = x.reshape(lax.axis_size(axis), -1, *x.shape[1:])
    received = lax.all_to_all(chunks, axis, split_axis=0, concat_axis=0)
    summed = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.sum(received, axis=0, dtype=summed).astype(x.dtype)
