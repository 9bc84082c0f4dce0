"""What the four strategies with full parameters on every rank share: they differ in their plans alone.

reduce    mean = sum over ranks of gradients / divisor        an all-reduce for each bucket of the plan
update    params, state = optimizer(mean)                     the same on every rank
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import optax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from .communication.buckets import BucketPlan, TensorSpec
from .communication.collectives import is_silent, joins_arrays
from .communication.hooks import Hook
from .communication.reduction import Means, Wire, pack, pack_small, reduce_buckets, sends_uncopied, unpack
from .layout import Leaf
from .strategy import Layout, Optimizer, Ranks, Strategy, in_compute_dtype
from .tree import like, split


def replicated(name: str, plan: Callable[[Sequence[TensorSpec]], BucketPlan], hook: Hook | None = None) -> Strategy:
    """A strategy of full parameters, by its plan."""
    return Strategy(name, plan, layout_full, in_compute_dtype, partial(reduce_full, hook), update_full, hook=hook)


def layout_full(params: Any, optimizer: Any, ranks: Ranks, trainable: Callable[[str], bool] | None = None) -> Layout:
    """Every rank has all of everything."""
    trained = split(params, trainable)[0]
    state = jax.eval_shape(optimizer.init, jax.tree.map(lambda leaf: leaf.held, trained))
    return Layout(ranks, params, params, mirrored(trained, state), of_optax(optimizer), trainable=trainable)


def mirrored(params: Any, state: Any) -> Any:
    """Lays out an optimizer's state: what has the shape of a parameter, and a path that ends in its path, lies as it.

    Of several it is that of a tree of parameters: ``0.mu.w`` is of ``w``, not ``mu.w``, if ``0`` holds a count too.
    """

    def name_of(path: Any) -> str:
        return f".{jax.tree_util.keystr(path, simple=True, separator='.')}" if path else ""

    leaves = {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    names = [name_of(path) for path, _ in jax.tree.leaves_with_path(state)]

    @cache
    def is_of_params(root: str) -> bool:
        return all(name.removeprefix(root) in leaves for name in names if name.startswith(f"{root}."))

    def place(path: Any, struct: Any) -> Leaf:
        name = name_of(path)
        of = [one for one in leaves if leaves[one].shape == struct.shape and name.endswith(one)]
        mirror = max(of, key=lambda one: (is_of_params(name.removesuffix(one)), len(one)), default=None)
        return Leaf(struct.shape, struct.dtype) if mirror is None else replace(leaves[mirror], dtype=struct.dtype)

    return jax.tree.map_with_path(place, state)


def reduce_full(
    hook: Hook | None, grads: Mapping[str, jax.Array], plan: BucketPlan, layout: Layout, *divisor_and_number: Any
) -> Means:
    """Every rank gets all mean gradients."""
    return all_reduce_grads(layout.ranks, hook, grads, plan, *divisor_and_number)


def all_reduce_grads(
    ranks: Ranks,
    hook: Hook | None,
    grads: Mapping[str, jax.Array],
    plan: BucketPlan,
    divisor: Any,
    number: Any = None,
) -> Means:
    """Sums gradients over ranks, bucket by bucket; those that the plan leaves out are equal on all ranks.

    On GPUs large gradients are sent as they are, where the plan does not hold them. XLA joins reductions of one key to
    one of several operands, without copies, which NCCL gets as one group; those of a hook may be merged with each
    other. ``jaxddp.compile_options`` keep those of other keys apart.
    """

    def send(buffer: Any, key: str) -> Any:
        if is_silent():
            return buffer
        with set_xla_metadata(combiner_key=key) if hook or joins_arrays() else contextlib.nullcontext():
            return (hook or lax.psum)(buffer, ranks.axis)

    is_joined = sends_uncopied(plan) and hook is None
    wire = Wire(pack_small if is_joined else pack, send, unpack, lambda name, grad: grad * ranks.num_ranks)
    return reduce_buckets(plan, wire, grads, divisor, number)


def update_full(
    grads: Mapping[str, jax.Array], opt_state: Any, params: Any, plan: BucketPlan, layout: Layout, value: Any
) -> tuple[Any, Any]:
    """Every rank updates all parameters."""
    del plan
    return layout.optimizer.step(like(params, dict(grads)), opt_state, params, value)


def of_optax(optimizer: optax.GradientTransformation) -> Optimizer:
    """The optimizer of an optax transformation."""
    update = optax.with_extra_args_support(optimizer).update

    def step(grads: Any, state: Any, params: Any, value: Any, full: Any = None) -> tuple[Any, Any]:
        del full
        updates, state = update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return Optimizer(optimizer.init, step)
