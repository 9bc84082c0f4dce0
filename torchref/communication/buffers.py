"""Packs a bucket's tensors into one buffer, and unpacks them.

pack:    buffer [sum of sizes]  = concatenate(ravel(tensor) for tensor in bucket)     one copy, none for one tensor
unpack:  tensor [shape]         = buffer[offset : offset + size] reshaped             views, no copy
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from jaxddp.communication.buckets import Bucket, TensorSpec


def pack(bucket: Bucket, tensors: Mapping[str, torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenates the tensors of a bucket, given by name, into ``[bucket.num_elements]``.

    ``out`` is a buffer to write into; a tensor that is already in its place there is not copied. A bucket of one tensor
    gives that tensor, uncopied.
    """
    if len(bucket.tensors) == 1:
        return tensors[bucket.tensors[0].name]
    if out is None:
        first = tensors[bucket.tensors[0].name]
        out = torch.empty(bucket.num_elements, dtype=first.dtype, device=first.device)
    for name, part in unpack(bucket, out).items():
        if part.data_ptr() != tensors[name].data_ptr():
            part.copy_(tensors[name])
    return out


def unpack(bucket: Bucket, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Splits a buffer into the tensors of its bucket: views by name, each of its tensor's shape."""
    if len(bucket.tensors) == 1:
        return {bucket.tensors[0].name: buffer}
    tensors, offset = {}, 0
    for tensor in bucket.tensors:
        tensors[tensor.name] = buffer[offset : offset + tensor.num_elements].view(tensor.shape)
        offset += tensor.num_elements
    return tensors


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describes a tensor for a bucket plan."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check_dense(name: str, grad: torch.Tensor) -> None:
    """Refuses gradients that cannot be packed into a buffer, those that are not dense, by a ValueError."""
    if grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name!r} has layout {grad.layout}: only dense gradients are supported")
