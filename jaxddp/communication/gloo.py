"""What XLA's collectives over Gloo get wrong, and what stands in for it: between processes on CPUs.

XLA hands a reduce-scatter to a Gloo routine that sends from a buffer and meanwhile writes this rank's result to the
front of it. Where a chunk is more than sockets take at once, rank 0 may be sent the result of another rank in place of
its own part of the sum, without any error: between two processes, chunks of 12 MiB and ranks that arrive apart, in one
call of ten. It also gives up when they arrive 30 seconds apart, whatever XLA was told. Seen with jaxlib 0.10.

An all-to-all of the chunks, added up where they arrive, sends the same bytes and is sound; on loopback it took half as
long. The plan says which of the two travels.

References:
    https://github.com/jax-ml/jax/issues/40830 and https://github.com/jax-ml/jax/issues/40831
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def kind_of_scatter(platform: str) -> str:
    """Says what carries a reduce-scatter out in this process: ``"reduce-scatter"``, or ``"all-to-all"`` over Gloo.

    Args:
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``, of the ranks.
    """
    return "all-to-all" if platform == "cpu" and jax.distributed.is_initialized() else "reduce-scatter"


def traced_platform() -> str:
    """Gives the platform of the mesh that is traced for, or of this process where that says none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def scatter_by_all_to_all(x: jax.Array, axis: str) -> jax.Array:
    """Sums over the ranks; rank r gets the r-th of N equal parts of the sum.

    Args:
        x: This rank's array, ``[N k, ...]``.
        axis: Name of the axis the ranks are on.

    Returns:
        This rank's chunk of the sum, ``[k, ...]``, added up in at least float32 in the order of the ranks.
    """
    chunks = x.reshape(lax.axis_size(axis), -1, *x.shape[1:])
    received = lax.all_to_all(chunks, axis, split_axis=0, concat_axis=0)
    summed = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.sum(received, axis=0, dtype=summed).astype(x.dtype)
