"""Packs a bucket's tensors into one buffer, and unpacks them.

pack:    buffer [sum of sizes]  = concatenate(ravel(tensor) for tensor in bucket)     one copy, none for one tensor
unpack:  tensor [shape]         = buffer[offset : offset + size] reshaped             no copy once compiled
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .buckets import Bucket


def pack(bucket: Bucket, tensors: Mapping[str, jax.Array]) -> jax.Array:
    """Concatenates the tensors of a bucket.

    Returns:
        A buffer of shape ``[bucket.num_elements]``; a bucket of one tensor gives that tensor, uncopied.
    """
    if len(bucket.tensors) == 1:
        return tensors[bucket.tensors[0].name]
    return jnp.concatenate([tensors[tensor.name].reshape(-1) for tensor in bucket.tensors])


def unpack(bucket: Bucket, buffer: jax.Array) -> dict[str, jax.Array]:
    """Splits a buffer into the tensors of its bucket.

    Returns:
        Arrays by name, each of its tensor's shape.
    """
    if len(bucket.tensors) == 1:
        return {bucket.tensors[0].name: buffer}
    tensors, offset = {}, 0
    for tensor in bucket.tensors:
        tensors[tensor.name] = buffer[offset : offset + tensor.num_elements].reshape(tensor.shape)
        offset += tensor.num_elements
    return tensors
