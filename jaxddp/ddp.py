"""Data parallelism with full parameters on every rank: four strategies, which differ in their plans alone.

    reduce    mean = sum over ranks of gradients / divisor        an all-reduce for each bucket of the plan
    update    params, state = optimizer(mean)                     the same on every rank

    ==========  ==========================================  =======  ==================================================
    strategy    one all-reduce for                          calls    what the step waits for
    ==========  ==========================================  =======  ==================================================
    naive       each of P parameters, after the backward    P        P latencies and all of the bytes
    flat        all gradients of a dtype, after it          1        one latency, a copy into a buffer, all of the bytes
    overlapped  each parameter, when its gradient is ready  P        at least the last gradient; P latencies
    bucketed    each bucket, as it fills                    buckets  at least the last bucket, and a latency for each
    ==========  ==========================================  =======  ==================================================

Each sends 2 (N-1)/N times the gradients' bytes per rank.
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

from .communication.buckets import (
    BucketMb,
    BucketPlan,
    Rule,
    TensorSpec,
    plan_all_reduces,
    plan_buckets,
    plan_per_tensor,
)
from .communication.collectives import is_silent, joins_arrays
from .communication.hooks import Hook
from .communication.reduction import Means, Wire, pack, pack_small, reduce_buckets, sends_uncopied, unpack
from .layout import Leaf
from .strategy import Layout, Optimizer, Ranks, Strategy, in_compute_dtype, register
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
    ranks: Ranks, hook: Hook | None, grads: Mapping[str, jax.Array], plan: BucketPlan, divisor: Any, number: Any = None
) -> Means:
    """Sums gradients over ranks, bucket by bucket; those that the plan leaves out are equal on all ranks.

    On GPUs large gradients are sent as they are: XLA joins the reductions of one key to one of several operands.
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
    return layout.optimizer.step(like(params, dict(grads)), opt_state, params, value)


def of_optax(optimizer: optax.GradientTransformation) -> Optimizer:
    """The optimizer of an optax transformation."""
    update = optax.with_extra_args_support(optimizer).update

    def step(grads: Any, state: Any, params: Any, value: Any, full: Any = None) -> tuple[Any, Any]:
        updates, state = update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return Optimizer(optimizer.init, step)


@register
def naive() -> Strategy:
    """One all-reduce per parameter, after the whole backward."""
    return replicated("naive", partial(plan_per_tensor, after_backward=True))


@register
def flat() -> Strategy:
    """One all-reduce of everything, or one per dtype, after the whole backward."""
    return replicated("flat", partial(plan_buckets, bucket_mb=None, after_backward=True))


@register
def overlapped() -> Strategy:
    """One all-reduce per parameter, as its gradient becomes ready."""
    return replicated("overlapped", plan_per_tensor)


@register
def bucketed(bucket_mb: BucketMb = "default", *, rule: Rule = "before", hook: Hook | None = None) -> Strategy:
    """One all-reduce per bucket, as the bucket fills; a ValueError if a cap or the rule is out of range.

    Args:
        bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_all_reduces``.
        rule: When a bucket closes; see ``plan_buckets``.
        hook: Sums a bucket over ranks, ``(buffer, axis) -> sum``, without state, such as ``jaxddp.hooks.bf16``.
    """
    plan_all_reduces([], bucket_mb, rule=rule)  # refuses a bad cap now, not at the first step
    if not (hook is None or callable(hook)):
        raise ValueError(f"hook (={hook!r}) must be a function, (buffer, axis) -> its sum over the ranks")
    return replicated("bucketed", partial(plan_all_reduces, bucket_mb=bucket_mb, rule=rule), hook)
