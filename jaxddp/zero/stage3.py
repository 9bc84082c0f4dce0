"""ZeRO stage 3 (fully sharded data parallelism): parameters are sharded as well.

A sharded parameter is full only while it is used. A unit, which is a function under ``jaxddp.layer`` (a layer, the
embedding, the head), gathers its parameters when it runs, drops them, and gathers them again in the backward. Its
gradients are reduce-scattered, which is the transpose of the gather. A rank holds 1/N of everything, up to three
units (``ordering.py``), and the small parameters, which stay replicated.

    ===================== ============= =====================================
    tensor                on each rank  bytes on each rank, AdamW, fp32
    ===================== ============= =====================================
    sharded parameter     a shard       4 Psi / N, and up to three full units
    its gradient          a shard       4 Psi / N, and up to three full units
    its moments           shards        8 Psi / N
    replicated parameter  ``[shape]``   16 Psi, with gradient and moments
    ===================== ============= =====================================

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

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..arguments import check_integer
from ..communication.buckets import BucketMb, plan_buckets
from ..communication.reduction import Means, divide
from ..layout import Leaf, cut_leaf
from ..replicated import all_reduce_grads, update_full
from ..strategy import Layout, Ranks, Strategy, of_optax, register
from ..tree import named_leaves, split
from .elementwise import shard_state
from .gather import Shard, gather, stacked_dims
from .layers import run_units, trace_marked, used_outside


@register
def zero3(*, min_shard_elements: int = 4096, bucket_mb: BucketMb = "default") -> Strategy:
    """Shards parameters: all-gathers them, and reduce-scatters their gradients, unit by unit.

    Args:
        min_shard_elements: Parameters with fewer elements stay full on every rank; their gradients are all-reduced.
        bucket_mb: Cap of the buckets of replicated gradients; see ``plan_buckets``.

    Returns:
        The strategy.

    Raises:
        ValueError: If a number is out of range.
    """
    least = max(check_integer("min_shard_elements", min_shard_elements, least=0), 1)
    plan_buckets([], bucket_mb)  # refuses a bad cap now, not at the first step
    return Strategy(
        "zero3",
        partial(plan_buckets, bucket_mb=bucket_mb),
        partial(layout_params, least),
        loss_on_shards,
        divide_shards,
        update_full,
        gathers_in_loss=True,
    )


def layout_params(
    least: int, params: Any, optimizer: Any, ranks: Ranks, trainable: Callable[[str], bool] | None = None
) -> Layout:
    """Every rank has a shard of each large parameter, and updates what it has.

    Dimension 0 is cut last: the parameter may be a stack of layers, of which one row is gathered at a time.
    """

    def held(leaf: Leaf) -> Leaf:
        is_small = math.prod(leaf.block) < least
        dims = range(len(leaf.shape))
        return leaf if is_small else cut_leaf(leaf, ranks.num_shards, [*dims[1:], *dims[:1]])

    updated = jax.tree.map(held, params)
    state = shard_state(optimizer, split(updated, trainable)[0])
    return Layout(ranks, updated, updated, state, of_optax(optimizer), trainable=trainable)


def loss_on_shards(loss: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Turns a loss function of full parameters, in the compute dtype, into one of what a rank holds."""
    ranks, leaves = layout.ranks, named_leaves(layout.params)
    has_warned = ranks.num_ranks == 1

    def used(leaf: Leaf) -> jax.ShapeDtypeStruct:
        is_cast = layout.compute_dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, layout.compute_dtype if is_cast else leaf.dtype)

    full = jax.tree.map(used, layout.params)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(full)]
    is_trained = layout.trainable or (lambda name: True)
    grad_dtypes = [layout.grad_dtypes[name] if is_trained(name) else None for name in leaves]

    def loss_of_shards(params: Any, *inputs: Any) -> Any:
        nonlocal has_warned
        program, result = trace_marked(loss, full, *inputs)
        held = zip(jax.tree.leaves(params), leaves.values(), dtypes, grad_dtypes, strict=True)
        values = [
            Shard(array, leaf, dtype, grad_dtype) if leaf.cut
            else array if array.dtype == dtype else array.astype(dtype)
            for array, leaf, dtype, grad_dtype in held
        ] + jax.tree.leaves(inputs)  # fmt: skip
        stacked = [stacked_dims(one.leaf) if isinstance(one, Shard) else None for one in values]
        early = sorted(used_outside(program.jaxpr, stacked))
        for at, array in zip(early, gather([values[at] for at in early], ranks)[0], strict=True):
            values[at] = array
        if early and not has_warned and not any(isinstance(one, Shard) for one in values):
            has_warned = True
            warnings.warn(
                "zero3 gathers all parameters before the forward: mark the layers of the model with jaxddp.layer",
                stacklevel=2,
            )
        return jax.tree.unflatten(jax.tree.structure(result), run_units(program, values, ranks, is_end=True))

    return loss_of_shards


def divide_shards(grads: Mapping[str, jax.Array], plan: Any, layout: Layout, divisor: Any, number: Any = None) -> Means:
    """The backward has summed the gradients of shards; those of small parameters are all-reduced."""
    small = {name: grad for name, grad in grads.items() if name not in layout.held}
    means = all_reduce_grads(None, small, plan, layout, divisor, number).grads
    return Means({name: divide(grad, divisor) for name, grad in grads.items() if name in layout.held} | means)
