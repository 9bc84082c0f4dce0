"""What the four strategies with full parameters on every rank share: they differ in their plans alone.

reduce    mean = sum over ranks of gradients / divisor        an all-reduce for each bucket of the plan
update    params, state = optimizer(mean)                     the same on every rank
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from .communication.buckets import BucketPlan, TensorSpec
from .communication.buffers import pack, pack_small, unpack
from .communication.collectives import is_silent, joins_arrays
from .communication.hooks import Hook
from .communication.reduction import Means, Wire, reduce_buckets, sends_uncopied
from .layout import Leaf
from .strategy import Layout, Ranks, Strategy, in_compute_dtype, of_optax
from .tree import like, named_leaves, path_name, split


def replicated(name: str, plan: Callable[[Sequence[TensorSpec]], BucketPlan], hook: Hook | None = None) -> Strategy:
    """A strategy of full parameters, by its plan."""
    reduce = partial(all_reduce_grads, hook)
    return Strategy(name, plan, layout_full, in_compute_dtype, reduce, update_full, hook=hook)


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
    hook: Hook | None, grads: Mapping[str, Any], plan: BucketPlan, layout: Layout, divisor: Any, number: Any = None
) -> Means:
    """Sums gradients over ranks, bucket by bucket; those that the plan leaves out are equal on all ranks."""
    return reduce_buckets(plan, all_reduce_wire(layout.ranks, plan, hook), grads, divisor, number)


def all_reduce_wire(ranks: Ranks, plan: BucketPlan, hook: Hook | None = None) -> Wire:
    """How buckets are all-reduced: on GPUs large gradients are sent as they are, where the plan does not hold them.

    XLA joins reductions of one key to one of several operands, without copies; ``compile_options`` keep others apart.
    """

    def send(buffer: Any, key: str) -> Any:
        if is_silent():
            return buffer
        with set_xla_metadata(combiner_key=key) if hook or joins_arrays() else contextlib.nullcontext():
            return (hook or lax.psum)(buffer, ranks.axis)

    is_joined = sends_uncopied(plan) and hook is None
    return Wire(pack_small if is_joined else pack, send, unpack, lambda name, grad: grad * ranks.num_ranks)


def update_full(
    grads: Mapping[str, jax.Array], opt_state: Any, params: Any, plan: BucketPlan, layout: Layout, value: Any
) -> tuple[Any, Any]:
    """Every rank updates all parameters."""
    del plan
    return layout.optimizer.step(like(params, dict(grads)), opt_state, params, value)
