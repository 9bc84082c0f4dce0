"""What the four strategies with full parameters on every rank share: they differ in their plans alone.

reduce    mean = sum over ranks of gradients / divisor        an all-reduce for each bucket of the plan
update    params, state = optimizer(mean)                     the same on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

from .communication.buckets import BucketPlan, TensorSpec
from .communication.buffers import pack, pack_small, unpack, unpack_small
from .communication.collectives import MAX_JOINED, all_reduce_as_one, is_silent, joins_arrays
from .communication.hooks import Hook
from .communication.reduction import Means, Wire, reduce_buckets
from .layout import Leaf
from .strategy import Layout, Optimizer, Ranks, Strategy, of_optax
from .tree import like, named_leaves, path_name, split


def replicated(name: str, plan: Callable[[Sequence[TensorSpec]], BucketPlan], hook: Hook | None = None) -> Strategy:
    """A strategy of full parameters, by its plan."""
    return Strategy(
        name, plan, layout_full, lambda loss, layout: loss, partial(all_reduce_grads, hook), update_full, hook=hook
    )


def layout_full(params: Any, optimizer: Any, ranks: Ranks, trainable: Callable[[str], bool] | None = None) -> Layout:
    """Every rank has all of everything."""
    trained = split(params, trainable)[0]
    state = jax.eval_shape(optimizer.init, jax.tree.map(lambda leaf: leaf.held, trained))
    leaves = named_leaves(params)

    def place(path: Any, struct: Any) -> Leaf:
        return replace(find_mirror(leaves, path, struct) or Leaf(struct.shape, struct.dtype), dtype=struct.dtype)

    opt_state = jax.tree_util.tree_map_with_path(place, state)
    return Layout(ranks, params, params, opt_state, of_optax(optimizer), trainable=trainable)


def find_mirror(params: Mapping[str, Leaf], path: Any, struct: Any) -> Leaf | None:
    """The parameter of which an optimizer keeps a leaf of its state: of its shape, with a path that ends its own."""
    name = f".{path_name(path)}"
    of = [one for one in params if params[one].shape == struct.shape and name.endswith(f".{one}" if one else "")]
    return params[max(of, key=len)] if of else None


def all_reduce_grads(
    hook: Hook | None,
    grads: Mapping[str, jax.Array],
    plan: BucketPlan,
    layout: Layout,
    divisor: Any,
    number: Any = None,
) -> Means:
    """Sums gradients over ranks, bucket by bucket; those that the plan leaves out are equal on all ranks."""
    wire = all_reduce_wire(layout.ranks, plan, hook)
    return on_blocks(partial(reduce_buckets, plan, wire), layout, grads, divisor, number, are_shards=False)


def on_blocks(
    function: Callable[..., Means],
    layout: Layout,
    grads: Mapping[str, jax.Array],
    divisor: Any,
    number: Any,
    *,
    are_shards: bool,
) -> Means:
    """Calls ``function(grads, divisor, number)`` on each device of a rank; the means are shards, or full."""
    if not layout.ranks.other_axes:
        return function(grads, divisor, number)
    # Blocks of a gradient go in, blocks of its mean come out, or of this rank's shard of it.
    given, found = ({name: layout.spec(name, is_shard=one) for name in grads} for one in (False, are_shards))
    mapped = layout.ranks.on_devices(lambda *args: function(*args).grads, (given, P(), P()), found)
    return Means(mapped(dict(grads), divisor, number))


def all_reduce_wire(ranks: Ranks, plan: BucketPlan, hook: Hook | None = None) -> Wire:
    """How buckets are all-reduced: on GPUs large gradients are sent as they are, where the plan does not hold them."""
    is_joined = sends_uncopied(plan) and hook is None

    def send(buffer: Any, key: str) -> Any:
        if is_silent():
            return buffer
        if hook is not None:  # its collectives may be merged with each other, not with those of other buckets
            with set_xla_metadata(combiner_key=key):
                return hook(buffer, ranks.axis)
        return all_reduce_as_one(buffer, ranks.axis, key) if joins_arrays() else lax.psum(buffer, ranks.axis)

    def pack_joined(bucket: Any, grads: Mapping[str, jax.Array]) -> Any:
        # Large tensors as they are, and one buffer of the small ones: (large, ..., [sum of small sizes])
        parts = pack_small(bucket, grads)
        return parts if len(parts) <= MAX_JOINED else pack(bucket, grads)

    def unpack_joined(bucket: Any, total: Any) -> dict[str, jax.Array]:
        return unpack_small(bucket, total) if isinstance(total, tuple) else unpack(bucket, total)

    return Wire(pack_joined if is_joined else pack, send, unpack_joined, lambda name, grad: grad * ranks.num_ranks)


def sends_uncopied(plan: BucketPlan) -> bool:
    """Whether large gradients are sent as the backward writes them, and not packed."""
    return plan.kind == "all-reduce" and joins_arrays() and not plan.after_backward


def update_full(
    grads: Mapping[str, jax.Array], opt_state: Any, params: Any, plan: BucketPlan, layout: Layout, value: Any
) -> tuple[Any, Any]:
    """Every rank updates all parameters."""
    del plan
    optimizer: Optimizer = layout.optimizer
    return optimizer.step(like(params, dict(grads)), opt_state, params, value)
