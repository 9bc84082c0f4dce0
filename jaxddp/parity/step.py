"""Parity of a training step that is not ours: on several ranks it must give what it gives on one device.

Where a result differs, the step is run again to tell faults apart: with the first rank's examples on every rank, with
one leaf of them, such as a mask, alike on all ranks, and with other keys.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arguments import check_integer
from ..mesh import data_mesh
from ..training.validation import check_batch
from ..tree import is_key, named_leaves

COPIES = "copies of "  # and a name: a leaf of which devices hold other bits


class Parted(NamedTuple):
    """A result of a step that is another one on several ranks."""

    name: str  # of the leaf, by its path in what the step returns; empty if it is of the step as a whole
    difference: float  # the largest of any element, relative to the largest element where that is above 1
    cause: str  # the likely one, in a line


class StepParityError(AssertionError):
    """A step that gives another result on several ranks than on one device: ``parted`` is what differs."""

    def __init__(self, parted: list[Parted], num_ranks: int) -> None:
        self.parted = parted
        lines = [f"  {one.name or 'the step'}, {one.difference:.1e} apart: {one.cause}" for one in parted]
        super().__init__("\n".join([f"on {num_ranks} ranks the step is not what it is on one device:", *lines]))


def check_step(
    make_step: Callable[[Mesh], Callable[..., Any]],
    state: Any,
    batch: Any,
    *,
    num_ranks: int = 4,
    axis: str = "data",
    atol: float = 1e-9,
    dtype: Any = jnp.float64,
) -> None:
    """Runs a training step on one device and on several, and says what differs, and why it may.

    Args:
        make_step: Mesh of one axis to a step, with jit, shard_map or pmap inside: ``(state, batch)`` to any tree of
            arrays, such as the next state and metrics.
        state: A tree of arrays and PRNG keys; kept. Each rank is given all of it, uncommitted.
        batch: Of all ranks; a tree of arrays ``[examples, ...]``.
        num_ranks: Ranks to compare with one, each with a device (``jaxddp.simulate_devices``).
        axis: Name of the mesh axis.
        atol: Largest difference of any element, of leaves with elements above 1 relative to the largest.
        dtype: To which floats of state and batch are cast; theirs if None.

    Raises a StepParityError if anything differs, with the likely cause of each, and a ValueError if the step changes no
    floating leaf of the state by more than ``atol``, the batch cannot be split, or there are too few devices.
    """
    data_mesh(check_integer("num_ranks", num_ranks, 2), axis=axis)  # checks both
    check_batch(batch, num_ranks, 1)
    with wide_enough(dtype):
        step = _Step(make_step, cast(state, dtype), cast(batch, dtype), num_ranks, axis, atol)
        step.check_moves()
        parted = step.parted()
    if parted:
        raise StepParityError(parted, num_ranks)


@dataclass
class _Step:
    """A step, which can be run on any number of ranks with any batch of the same kind."""

    make_step: Callable[[Mesh], Callable[..., Any]]
    state: Any
    batch: Any
    num_ranks: int
    axis: str
    atol: float

    @cached_property
    def one(self) -> dict[str, np.ndarray]:
        """What it returns on one device, by name."""
        return self._run(1)

    @cached_property
    def before(self) -> dict[str, np.ndarray]:
        """What leaves of the next state were, by their names in what the step returns: paths that end in theirs."""
        old = {name: np.asarray(leaf) for name, leaf in named_leaves(self.state).items() if not is_key(leaf)}
        found: dict[str, np.ndarray] = {}
        for name, leaf in self.one.items():
            ends = [path for path in old if not path or f".{name}".endswith(f".{path}")]
            if (path := max(ends, key=len, default=None)) is not None and old[path].shape == leaf.shape:
                found[name] = old[path]
        return found

    def check_moves(self) -> None:
        """Refuses a step that leaves the state as it is: faults of its gradients would not show."""
        floating = [np.asarray(leaf) for leaf in jax.tree.leaves(self.state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        was = {name: [leaf] for name, leaf in self.before.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)} or {
            name: some  # where it returns the state under other names, leaves of its shapes
            for name, leaf in self.one.items()
            if (some := [one for one in floating if one.shape == leaf.shape])
        }
        stays = [any(difference(self.one[name], leaf) <= self.atol for leaf in some) for name, some in was.items()]
        if not self.one or (stays and all(stays)):
            raise ValueError(
                f"make_step's step must return what it changes, the next state, by more than atol (={self.atol:g}):"
                " is its learning rate 0?"
            )

    def parted(self) -> list[Parted]:
        """Gives what differs."""
        several = self._run(self.num_ranks)
        unlike = [name.removeprefix(COPIES) for name in several if name.startswith(COPIES)]
        if self._agree(self.one, several) and not unlike:
            return []
        if self.is_random and self.is_same_of_shard:  # noise of parameters is the same on all ranks, and on one device
            return [Parted("", np.inf, "ranks draw the same noise: fold jax.lax.axis_index into the key")]
        copies = "ranks hold copies that differ: it is not reduced over them"
        parted = [Parted(name, np.inf, copies) for name in unlike]
        for name, right in self.one.items():
            apart = difference(several[name], right)
            if name not in unlike and not apart <= self.atol:
                parted.append(Parted(name, apart, self._ratio(name, several[name]) or self.cause))
        return parted

    def _ratio(self, name: str, found: np.ndarray) -> str:
        """Whether a leaf, or what a step adds to it, is N times too large or too small."""
        wide, count = np.result_type(found, np.float64), self.num_ranks
        found, right = np.asarray(found, wide), np.asarray(self.one[name], wide)
        if not np.isfinite(right).all():
            return "it is not finite on one device either"
        causes = {
            count: f"{count} times as large: summed where the mean is meant, or again after autodiff has summed it",
            count**2: f"{count**2} times as large: as squares of something {count} times too large",
            1 / count: f"1/{count} as large: it is a mean where the sum is meant, or divided twice",
        }
        for old in (0, self.before.get(name, 0)):
            for factor, why in causes.items():
                if difference(found - old, factor * (right - old), 0.0) <= 1e-6:
                    return why
        return ""

    @cached_property
    def cause(self) -> str:
        """Why results may differ in another way than by a factor."""
        if self.is_random:
            return "random numbers depend on the number of devices, as keys folded with the rank: compare without noise"
        if not self.is_same_of_shard:
            return "it depends on the rank or the number of ranks, also where all have the same examples"
        of_examples = "statistics of a rank's own examples, as BatchNorm's"
        for name, leaf in named_leaves(self.batch).items():
            if is_key(leaf):
                continue
            is_mask = np.isin(leaf, [0, 1]).all()
            if not (is_mask or leaf.dtype.kind in "iu" or (leaf.ndim == 1 and (leaf >= 0).all())):
                continue  # labels, masks and weights may say which examples count
            alike = jax.tree.map(lambda one, leaf=leaf: self._alike(one) if one is leaf else one, self.batch)
            if self._agree(self._run(1, alike), self._run(self.num_ranks, alike)):
                of_inputs = "" if is_mask else f"; or {of_examples}"  # an input's are alike then as well
                weights = f"whose weights by batch leaf {name!r} differ: sum both, divide once"
                return f"a mean of the ranks' means, {weights}{of_inputs}"
        return f"{of_examples}, or a loss that is no mean over examples"

    @cached_property
    def is_random(self) -> bool:
        """Whether other keys give another result on one device."""
        batch, state = jax.tree.map(_with_other_key, (self.batch, self.state))
        return not self._agree(self.one, self._run(1, batch, state))

    @cached_property
    def is_same_of_shard(self) -> bool:
        """Whether it is the same on all ranks, each with the first one's examples, as on one device with these."""
        shard = jax.tree.map(lambda leaf: leaf[: len(leaf) // self.num_ranks], self.batch)
        alike = jax.tree.map(self._alike, self.batch)
        return self._agree(self._run(1, shard), self._run(self.num_ranks, alike))

    def _alike(self, leaf: Any) -> Any:
        """A leaf of the batch with the first rank's examples on every rank."""
        return jnp.concatenate([leaf[: len(leaf) // self.num_ranks]] * self.num_ranks)

    def _agree(self, one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
        return all(difference(other[name], leaf) <= self.atol for name, leaf in one.items())

    def _run(self, num_ranks: int, batch: Any = None, state: Any = None) -> dict[str, np.ndarray]:
        """What the step returns, by name; of its own batch and state if not given."""
        mesh = data_mesh(num_ranks, axis=self.axis)
        batch, state = self.batch if batch is None else batch, self.state if state is None else state
        # A copy, which a step may donate; uncommitted, since pmap refuses what lies on a mesh.
        state = jax.tree.map(jnp.array, state)
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(self.axis)))
        return on_host(jax.tree.map(jnp.asarray, jax.block_until_ready(self.make_step(mesh)(state, batch))))


def _with_other_key(leaf: Any) -> Any:
    """Another key where a leaf is one, typed or ``[2]`` words."""
    if is_key(leaf):
        return jax.random.wrap_key_data(jax.random.key_data(leaf) + 1, impl=leaf.dtype)
    return leaf + 1 if leaf.dtype == np.uint32 and leaf.shape == (2,) else leaf


def wide_enough(dtype: Any) -> AbstractContextManager[Any]:
    """Lets JAX compute in float64 where that is the dtype."""
    return jax.enable_x64(jax.config.read("jax_enable_x64") or dtype == jnp.float64)


def cast(tree: Any, dtype: Any) -> Any:
    """A tree with its floating leaves in a dtype, complex ones alike; the leaves as they are if it is None."""

    def leaf_in_dtype(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and is_key(leaf):
            return leaf
        array = np.asarray(leaf)
        if dtype is None or not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        return array.astype(jnp.promote_types(dtype, jnp.complex64) if np.iscomplexobj(array) else dtype)

    return jax.tree.map(leaf_in_dtype, tree)


def on_host(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by name, without keys, and ``COPIES`` that differ."""
    found: dict[str, np.ndarray] = {}
    for name, leaf in named_leaves(tree).items():
        if not is_key(leaf):
            found[name] = np.asarray(leaf)
        copies: dict[str, set[bytes]] = {}
        for shard in (jax.random.key_data(leaf) if is_key(leaf) else leaf).addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        if any(len(bits) > 1 for bits in copies.values()):
            found[COPIES + name] = np.array(0)
    return found


def difference(found: np.ndarray, right: np.ndarray, least: float = 1.0) -> float:
    """The largest of any element, relative to the largest element where that is above ``least``."""
    if found.shape != right.shape:
        return np.inf
    wide = np.complex128 if np.iscomplexobj(right) else np.float64
    is_same = found == right  # also two infinities
    one, other = (np.where(is_same, 0, array.astype(wide)) for array in (found, right))
    apart = np.max(np.abs(one - other), initial=0.0)
    size = np.max(np.abs(right), initial=0.0, where=np.isfinite(right))
    return float(apart / (max(least, float(size)) or 1.0))
