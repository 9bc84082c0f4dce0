"""Packs a bucket's tensors into the buffer that is summed over ranks, and unpacks it; ``ddp.py`` sends it.

pack:    buffer [sum of sizes]  = concatenate(ravel(tensor) for tensor in bucket)     one copy, none for one tensor
unpack:  tensor [shape]         = buffer[offset : offset + size] reshaped             views, no copy
"""

from collections.abc import Mapping

import torch

from jaxddp.communication.buckets import Bucket, TensorSpec


def pack(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Concatenates the tensors of a bucket, given by name; a bucket of one gives that tensor, uncopied."""
    if len(bucket.tensors) == 1:
        return tensors[bucket.tensors[0].name]
    return torch.cat([tensors[tensor.name].reshape(-1) for tensor in bucket.tensors])


def unpack(bucket: Bucket, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Splits a buffer into the tensors of its bucket: views by name, each of its tensor's shape."""
    if len(bucket.tensors) == 1:
        return {bucket.tensors[0].name: buffer}
    parts = buffer.split([tensor.num_elements for tensor in bucket.tensors])
    return {tensor.name: part.view(tensor.shape) for tensor, part in zip(bucket.tensors, parts, strict=True)}


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describes a tensor for a bucket plan."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check_dense(name: str, grad: torch.Tensor) -> None:
    """Refuses gradients that cannot be packed into a buffer, those that are not dense, by a ValueError."""
    if grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name!r} has layout {grad.layout}: only dense gradients are supported")
