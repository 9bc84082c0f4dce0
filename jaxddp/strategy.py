"""The contract: a strategy is five functions that every rank runs.

    plan(tensors)                              which gradients are reduced together, and what waits for the backward
    layout(params, optimizer, ranks, ...)      which parameters and which optimizer state are shards
    full(loss, layout)                         what the loss reads: itself, or with an all-gather in each layer
    reduce(grads, plan, layout, divisor)       this rank's gradients -> mean gradients, bucket by bucket
    update(grads, opt_state, params, ...)      the optimizer on full parameters; or on shards, then an all-gather

``training/step.py`` calls them in this order. What others need to know of a strategy is in its plan and its layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .communication.buckets import BucketPlan, TensorSpec
from .communication.collectives import Axis, silent
from .communication.reduction import Means
from .scopes import OTHER_AXES_SCOPE
from .tree import merge, named_leaves, split


class Optimizer(NamedTuple):
    """An optimizer of what a rank updates."""

    init: Callable[[Any], Any]  # parameters -> its state
    # (gradients, state, parameters, loss, full parameters if every rank has them) -> (updated parameters, next state)
    step: Callable[..., tuple[Any, Any]]


class Masters(NamedTuple):
    """Optimizer state of parameters that the loss takes in a compute dtype."""

    params: Any  # in their own dtype; the optimizer updates these
    inner: Any  # the optimizer's state


@dataclass(frozen=True)
class Ranks:
    """The ranks of a step, by mesh axes."""

    axis: Axis  # along which they lie; of several, state is sharded over the last and replicated along the others
    num_ranks: int  # along all of these
    num_shards: int  # along the last one
    other_axes: tuple[str, ...] = ()  # axes of the mesh that are XLA's, along which parameters may be split
    shard_axis = cached_property(lambda self: self.axis if isinstance(self.axis, str) else self.axis[-1])
    replica_axes = cached_property(lambda self: () if isinstance(self.axis, str) else self.axis[:-1])

    def on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Maps a function over the devices of a rank, each of which has blocks of its own; itself if it has one."""
        if not self.other_axes:
            return function
        mapped = jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names={*self.other_axes}, check_vma=False
        )
        return jax.named_scope(OTHER_AXES_SCOPE)(mapped)  # where blocks lie otherwise before or after


@dataclass(frozen=True)
class Layout:
    """How the training state of one model lies over the ranks."""

    ranks: Ranks
    params: Any  # parameters between steps; a tree of ``Leaf``
    updated: Any  # what the optimizer updates, the same parameters or shards of them; a tree of ``Leaf``
    opt_state: Any  # the optimizer's state; a tree of ``Leaf``
    optimizer: Optimizer  # of what a rank updates
    compute_dtype: Any = None  # of the floating parameters that the loss takes; their own if None
    grad_dtype: Any = None  # in which gradients are added up and summed over ranks; each parameter's own if None
    trainable: Callable[[str], bool] | None = None  # predicate on a parameter's name; None trains all
    owners: Any = None  # which rank owns which parameter, where whole ones have owners (``zero/owners.py``)
    # By name: how parameters that are shards between steps are cut, and those that are updated by shards:
    held = cached_property(
        lambda self: {name: leaf.cut for name, leaf in named_leaves(self.params).items() if leaf.cut}
    )
    cuts = cached_property(lambda self: {name: leaf.cut for name, leaf in self.leaves.items() if leaf.cut})
    leaves = cached_property(lambda self: named_leaves(self.updated))
    # In which dtype parameters are updated, and in which gradients are added up:
    dtypes = cached_property(lambda self: {name: leaf.dtype for name, leaf in self.leaves.items()})
    grad_dtypes = cached_property(lambda self: {name: self.grad_dtype or one for name, one in self.dtypes.items()})
    # How parameters lie along the other axes, and how what is updated of them does:
    specs = cached_property(lambda self: {name: leaf.spec for name, leaf in self.leaves.items()})
    shard_specs = cached_property(lambda self: {name: leaf.shard_spec for name, leaf in self.leaves.items()})


class Strategy(NamedTuple):
    """A way to train on several ranks with equal results; see the module's docstring."""

    name: str  # its key in ``STRATEGIES``
    plan: Callable[[Sequence[TensorSpec]], BucketPlan]  # of tensors in the order in which gradients become ready
    layout: Callable[..., Layout]  # (params, optimizer, ranks, trainable), the first a tree of ``Leaf`` that are full
    full: Callable[..., Any]  # (loss, layout) -> the loss of parameters as they are held, in the compute dtype
    # (gradients by name, plan, layout, divisor, number) -> what this rank updates with; the number is that of the
    # micro-batch where each one is reduced.
    reduce: Callable[..., Means]
    update: Callable[..., tuple[Any, Any]]  # (gradients, opt_state, params, plan, layout, value) -> params, opt_state
    # Whether parameters are full only inside the loss: then ``full`` casts the masters, where there is a compute dtype,
    # and XLA may not start collectives as early as it can, or all would be gathered at once.
    gathers_in_loss: bool = False
    hook: Callable[..., jax.Array] | None = None  # sums a bucket instead of an all-reduce; ``communication/hooks.py``
    sends: bool = True  # False if it communicates nothing: ``without_communication``
    variant: str = ""  # tells it in tables from others of its name, such as ``"by leaves"``


STRATEGIES: dict[str, Callable[..., Strategy]] = {}  # read it from registry.py, which fills it


def register(factory: Callable[..., Strategy]) -> Callable[..., Strategy]:
    """Adds a factory to ``STRATEGIES`` under its own name; a decorator."""
    STRATEGIES[factory.__name__] = factory
    return factory


def in_compute_dtype(loss: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """A loss function of full parameters that casts them; trained ones with masters are cast already."""
    if layout.compute_dtype is None:
        return loss

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(layout.compute_dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return lambda params, *inputs: loss(jax.tree.map(cast, params), *inputs)


def with_masters(layout: Layout, compute_dtype: Any) -> Layout:
    """Keeps the masters of trained parameters in the optimizer's state, and parameters in the compute dtype.

    master, state = optimizer(gradient, state, master)        param = master cast to the compute dtype
    """
    inner = layout.optimizer

    def step(grads: Any, state: Masters, params: Any, value: Any, full: Any = None) -> tuple[Any, Masters]:
        # The gradient is in the master's dtype by now; ``full`` are copies of the masters.
        masters, of_inner = inner.step(grads, state.inner, state.params, value)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), masters, params), Masters(masters, of_inner)

    trained, frozen = split(layout.params, layout.trainable)
    return replace(
        layout,
        params=merge(jax.tree.map(lambda leaf: replace(leaf, dtype=compute_dtype), trained), frozen),
        opt_state=Masters(split(layout.updated, layout.trainable)[0], layout.opt_state),
        optimizer=Optimizer(lambda params: Masters(params, inner.init(params)), step),
    )


def on_blocks(strategy: Strategy, layout: Layout) -> Strategy:
    """The strategy where a rank has several devices, each of which reduces the gradients of its own blocks."""

    def reduce(grads: Any, plan: BucketPlan, layout: Layout, divisor: Any, number: Any = None) -> Means:
        def on_device(grads: Any, divisor: Any, number: Any) -> dict[str, jax.Array]:
            return strategy.reduce(grads, plan, layout, divisor, number).grads

        given = {name: (layout.shard_specs if name in layout.held else layout.specs)[name] for name in grads}
        found = {name: layout.shard_specs[name] for name in grads}
        mapped = layout.ranks.on_devices(on_device, (given, PartitionSpec(), PartitionSpec()), found)
        return Means(mapped(dict(grads), divisor, number))

    return strategy._replace(reduce=reduce) if layout.ranks.other_axes else strategy


def without_communication(strategy: Strategy) -> Strategy:
    """The strategy with its communication removed, to be timed: every rank takes its own part for the sum."""
    return strategy._replace(
        full=lambda loss, layout: silent()(strategy.full(loss, layout)),
        reduce=silent()(strategy.reduce),
        update=silent()(strategy.update),
        sends=False,
    )
