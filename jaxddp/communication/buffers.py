"""Packs a bucket's tensors into one buffer, and unpacks them.

pack:    buffer [sum of sizes]  = concatenate(ravel(tensor) for tensor in bucket)     one copy, none for one tensor
unpack:  tensor [shape]         = buffer[offset : offset + size] reshaped             no copy once compiled

On GPUs one all-reduce takes several arrays, so only tensors that are small are copied:

parts:   (large tensor, ..., pack(small tensors))
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .buckets import MIB, Bucket, TensorSpec

# Bytes from which a tensor is sent as it is. The copy of a smaller one takes an H100 less than a microsecond.
LARGE_BYTES = MIB
MAX_JOINED = 256  # XLA's limit


def pack(bucket: Bucket, tensors: Mapping[str, jax.Array]) -> jax.Array:
    """Concatenates the tensors of a bucket.

    Returns:
        A buffer of shape ``[bucket.num_elements]``; a bucket of one tensor gives that tensor, uncopied.
    """
    if len(bucket.tensors) == 1:
        return tensors[bucket.tensors[0].name]
    return jnp.concatenate([tensors[tensor.name].reshape(-1) for tensor in bucket.tensors])


def unpack(bucket: Bucket, buffer: jax.Array | tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    """Splits a buffer, or the parts that ``pack_small`` gives, into the tensors of its bucket.

    Returns:
        Arrays by name, each of its tensor's shape.
    """
    if isinstance(buffer, tuple):
        large, small = _by_size(bucket)
        tensors = {tensor.name: part for tensor, part in zip(large, buffer, strict=False)}
        return tensors | unpack(small, buffer[-1]) if small.tensors else tensors
    if len(bucket.tensors) == 1:
        return {bucket.tensors[0].name: buffer}
    tensors, offset = {}, 0
    for tensor in bucket.tensors:
        tensors[tensor.name] = buffer[offset : offset + tensor.num_elements].reshape(tensor.shape)
        offset += tensor.num_elements
    return tensors


def pack_small(bucket: Bucket, tensors: Mapping[str, jax.Array]) -> jax.Array | tuple[jax.Array, ...]:
    """Gives the large tensors of a bucket as they are, in its order, and after them a buffer of all small ones.

    One all-reduce takes at most ``MAX_JOINED`` arrays; if there are more, all are packed.
    """
    large, small = _by_size(bucket)
    if len(large) + bool(small.tensors) > MAX_JOINED:
        return pack(bucket, tensors)
    return (*(tensors[tensor.name] for tensor in large), *((pack(small, tensors),) if small.tensors else ()))


def _by_size(bucket: Bucket) -> tuple[list[TensorSpec], Bucket]:
    large = [tensor for tensor in bucket.tensors if tensor.num_bytes >= LARGE_BYTES]
    return large, Bucket(tuple(tensor for tensor in bucket.tensors if tensor.num_bytes < LARGE_BYTES))
