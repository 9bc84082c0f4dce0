"""ZeRO stage 3 (fully sharded data parallelism): parameters are sharded as well.

A sharded parameter is full only while it is used. A unit, which is a function under ``jaxddp.layer`` (a layer, the
embedding, the head), gathers its parameters when it runs, drops them, and gathers them again in the backward. Its
gradients are reduce-scattered, which is the transpose of the gather. A rank holds 1/N of everything, the unit that is
running, and the small parameters, which stay replicated.

    ===================== ====================== ===================================
    tensor                on each rank           bytes on each rank, AdamW, fp32
    ===================== ====================== ===================================
    sharded parameter     ``[c]``, c = ceil(n/N) 4 Psi / N, and one full unit
    its gradient          ``[c]``                4 Psi / N, and one full unit
    its moments           ``[c]`` each           8 Psi / N
    replicated parameter  ``[shape]``            16 Psi, with gradient and moments
    ===================== ====================== ===================================

    forward   of unit u:  p = all-gather of p[r]           y = u(p, x)                 drop p
    backward  of unit u:  p = all-gather of p[r]           dx, dp = u'(p, x, dy)       drop p
                          g[r] = row r of the sum over ranks of dp                     reduce-scatter, drop dp
    update                p[r] += optimizer(g[r] / N, state[r], p[r])

    gathers per step, U units: 2U - 1 in a loop, where the last unit keeps its parameters; 2U under a scan;
                               less one for each unit whose backward needs no parameters, such as an embedding
    bytes sent per rank:       3 (N-1)/N * parameter bytes, less those that are gathered once

Parameters used outside of units are gathered before the forward and held to the end of the backward: a model without
units has sharded state, and no guarantee about temporary memory.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.3).
    Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..arguments import check_integer
from ..communication.buckets import BucketMb, TensorSpec, chunk_elements, plan_buckets
from ..communication.collectives import Axis
from ..communication.compression import Compression, none
from ..communication.sharding import Blocks, Cut
from ..loss import PartialLoss
from ..strategy import Precision, Strategy, register
from ..tree import is_floating, path_name
from .gather import Gather, Shard
from .layers import run, trace_marked

_MOST_PADDING = 1e-3


@register
def zero3(
    *,
    min_shard_elements: int = 4096,
    master_dtype: Any = None,
    compute_dtype: Any = None,
    gather_dtype: Any = None,
    reduce_dtype: Any = None,
    bucket_mb: BucketMb = "default",
    compression: Compression = none,
) -> Strategy:
    """Shards parameters: all-gathers them, and reduce-scatters their gradients, unit by unit.

    Args:
        min_shard_elements: Parameters with fewer elements stay full on every rank; their gradients are all-reduced.
        master_dtype: Dtype of shards, optimizer state and accumulated gradients; that of the parameters given to
            ``Trainer.init`` if None.
        compute_dtype: Dtype of the floating-point parameters that the loss function gets; ``master_dtype`` if None.
        gather_dtype: Dtype of all-gathers; ``compute_dtype`` if None.
        reduce_dtype: Dtype of reduce-scatters; if None the trainer's ``grad_dtype``, or else ``master_dtype``.
            Gradients of replicated parameters are reduced in ``grad_dtype``.
        bucket_mb: Cap of the buckets of replicated gradients; see ``plan_buckets``.
        compression: ``none``, or ``noop`` for a step without communication.

    Returns:
        The strategy.

    Raises:
        ValueError: If a number is out of range, a dtype is not floating, or the compression is another one.
    """
    min_shard_elements = check_integer("min_shard_elements", min_shard_elements, least=0)
    precision = Precision(master_dtype, compute_dtype, gather_dtype, reduce_dtype)
    for name, dtype in precision._asdict().items():
        if dtype is not None and not is_floating(dtype):
            raise ValueError(f"{name} (={dtype!r}) must be a floating dtype or None")
    if compression.name not in ("none", "noop"):
        raise ValueError(f"compression (={compression.name!r}) must be none or noop at stage 3: use reduce_dtype")
    plan_buckets([], bucket_mb)  # refuses a bad cap now, not at the first step

    def cut(tensor: TensorSpec, num_ranks: int) -> Cut | None:
        return None if tensor.num_elements < max(min_shard_elements, 1) else cut_of(tensor.shape, num_ranks)

    return Strategy(
        "zero3",
        partial(plan_buckets, bucket_mb=bucket_mb),
        compression,
        shards_optimizer_state=True,
        shards_gradients=True,
        shards_params=True,
        cut=cut,
        precision=precision,
    )


def cut_of(shape: tuple[int, ...], num_ranks: int) -> Cut:
    """Cuts a parameter by row, as it may be a stack of layers, unless that would pad it by more than 0.1 %.

    Args:
        shape: Shape of the full parameter.
        num_ranks: Number of ranks.

    Returns:
        The cut.

    Example:
        >>> cut_of((12, 640, 2560), 8).shard_shape, cut_of((12, 5), 8).shard_shape
        ((12, 1, 204800), (1, 8))
    """
    by_row = Cut(shape, num_ranks, by_row=True) if len(shape) > 1 else None
    if by_row is None or by_row.row_elements == 0:
        return Cut(shape, num_ranks)
    padded = num_ranks * chunk_elements(by_row.row_elements, num_ranks)
    return by_row if padded <= (1 + _MOST_PADDING) * by_row.row_elements else Cut(shape, num_ranks)


def loss_on_shards(
    loss: PartialLoss,
    params: Any,
    cuts: dict[str, Cut],
    axis: Axis,
    precision: Precision,
    *,
    trainable: Callable[[str], bool] | None = None,
    sends: bool = True,
    as_bits: bool = False,
    blocks: Mapping[str, Blocks] = MappingProxyType({}),
    other_axes: tuple[str, ...] = (),
) -> PartialLoss:
    """Turns a loss function of full parameters into one of shards.

    Args:
        loss: As from ``partial_loss``.
        params: The full parameters, as ``jax.ShapeDtypeStruct``.
        cuts: How parameters are cut, by name; the others are replicated.
        axis: Name of the mesh axis, or of several.
        precision: Dtypes of parameters in the loss, of all-gathers and of reduce-scatters.
        trainable: Predicate on a parameter's name; gradients of the others are not reduced.
        sends: False for a step without communication.
        as_bits: As for ``all_gather``.
        blocks: How other axes of the mesh split parameters, by name.
        other_axes: Those axes.

    Returns:
        The same loss function, of a tree with this rank's shards in place of the parameters that are cut.
    """
    gather = Gather(axis, precision, sends, as_bits, other_axes)

    def as_used(struct: Any) -> Any:
        dtype = precision.compute_dtype if jnp.issubdtype(struct.dtype, jnp.floating) else None
        return jax.ShapeDtypeStruct(struct.shape, dtype or struct.dtype)

    full = jax.tree.map(as_used, params)

    def loss_of_shards(params: Any, *inputs: Any) -> Any:
        program, results = trace_marked(loss, full, *inputs)

        def argument(path: Any, array: jax.Array, struct: Any) -> Any:
            name = path_name(path)
            if name not in cuts:
                return array if array.dtype == struct.dtype else array.astype(struct.dtype)
            local = array.reshape(cuts[name].rows, -1) if cuts[name].by_row else array.reshape(-1)
            return Shard(local, cuts[name], struct.dtype, trainable is None or trainable(name), blocks.get(name))

        arguments = jax.tree_util.tree_map_with_path(argument, params, full)
        values = run(program, jax.tree.leaves((arguments, inputs)), gather)
        return jax.tree.unflatten(jax.tree.structure(results), values)

    return loss_of_shards
