"""Parity of a training step that is not ours: on several ranks it must give what it gives on one device.

    def make_step(mesh):  # your own, with jit, shard_map or pmap inside
        ...
        return step       # (state, batch) -> anything, such as the next state and metrics

    jaxddp.parity.check_step(make_step, state, batch)

Where a result differs, the step is run again to tell faults apart: with the first rank's examples on every rank, with
one leaf of them, such as a mask, alike on all ranks, and with other keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arguments import check_integer
from ..mesh import data_mesh
from ..training.validation import check_batch
from ..tree import is_key, named_leaves
from .comparing import cast, difference, has_unlike_copies, wide_enough


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
        make_step: Mesh of one axis to a step, ``(state, batch)`` to any tree of arrays.
        state: A tree of arrays and PRNG keys; kept. Each rank is given all of it, uncommitted.
        batch: Of all ranks; a tree of arrays whose dimension 0 counts examples.
        num_ranks: Ranks to compare with one; there must be as many devices (``jaxddp.simulate_devices``).
        axis: Name of the mesh axis.
        atol: Largest difference of any element, of leaves with elements above 1 relative to the largest. Float64 needs
            more than 1e-9 only where gradients nearly vanish before a division, or the step computes in less.
        dtype: To which floats of state and batch are cast; theirs if None.

    Raises:
        StepParityError: If anything differs: with the likely cause of each.
        ValueError: If the batch cannot be split, there are too few devices, or the step changes no floating leaf of
            the state by more than ``atol``.
    """
    data_mesh(check_integer("num_ranks", num_ranks, 2), axis=axis)  # checks both
    check_batch(batch, num_ranks, 1)
    with wide_enough(dtype):
        step = _Step(make_step, cast(state, dtype), cast(batch, dtype), num_ranks, axis, atol)
        parted = list(step.parted())
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

    def parted(self) -> Iterator[Parted]:
        """Gives what differs."""
        one, several, unlike = self._run(1), self._run(self.num_ranks), set(self._unlike)
        old = {name: np.asarray(leaf) for name, leaf in named_leaves(self.state).items() if not is_key(leaf)}
        before = _before(one, old)
        if not self._moves(one, before, old):
            raise ValueError(
                f"make_step's step must return what it changes, the next state, by more than atol (={self.atol:g}):"
                " is its learning rate 0?"
            )
        shard = jax.tree.map(lambda leaf: leaf[: len(leaf) // self.num_ranks], self.batch)
        is_same_of_shard = self._agree(self._run(1, shard), self._run(batch=jax.tree.map(self._alike, self.batch)))
        # Noise of parameters is the same on all ranks, and as on one device.
        if not self._agree(one, several) and self._is_random(one) and is_same_of_shard:
            yield Parted("", np.inf, "ranks draw the same noise: fold jax.lax.axis_index into the key")
            return
        for name, right in one.items():
            apart = difference(several[name], right)
            if name in unlike:
                yield Parted(name, apart, "ranks hold copies that differ: it is not reduced over them")
            elif not apart <= self.atol:
                is_broken = not np.isfinite(apart) and not np.isfinite(right).all()
                cause = "it is not finite on one device either" if is_broken else ""
                cause = cause or self._ratio(several[name], right, before.get(name))
                yield Parted(name, apart, cause or self._cause(one, is_same_of_shard))
        for name in sorted(unlike - one.keys()):
            yield Parted(name, np.inf, "ranks hold keys that differ: each goes on with another state")

    def _moves(self, one: dict[str, np.ndarray], before: dict[str, np.ndarray], old: dict[str, np.ndarray]) -> bool:
        """Whether a step changes the state; where it gives that under other names, judged by leaves of its shapes."""

        def is_new(leaf: np.ndarray, *of_state: np.ndarray) -> bool:
            return all(not difference(leaf, was) <= self.atol for was in of_state)

        known = [name for name in before if _is_floating(before[name])]
        floating = [leaf for leaf in old.values() if _is_floating(leaf)]
        if known or not floating:
            return any(name not in before or is_new(one[name], before[name]) for name in known or one)
        found = [(leaf, [was for was in floating if was.shape == leaf.shape]) for leaf in one.values()]
        alike = [(leaf, some) for leaf, some in found if some]  # none where it gives metrics alone
        return any(is_new(leaf, *some) for leaf, some in alike) if alike else bool(one)

    def _ratio(self, found: np.ndarray, right: np.ndarray, before: np.ndarray | None) -> str:
        """Whether what a step adds to a leaf is N times too large or too small."""
        old = 0 if before is None else before
        moved, wanted = (np.asarray(new, np.float64) - old for new in (found, right))
        scale = float(np.sum(wanted * wanted))
        ratio = float(np.sum(moved * wanted)) / scale if scale else 0.0
        if not np.max(np.abs(moved - ratio * wanted), initial=0.0) <= 1e-6 * np.max(np.abs(moved), initial=0.0):
            return ""
        count = self.num_ranks
        causes = {
            count: f"{count} times as large: summed where the mean is meant, or again after autodiff has summed it",
            count**2: f"{count**2} times as large: as squares of something {count} times too large",
            1 / count: f"1/{count} as large: it is a mean where the sum is meant, or divided twice",
        }
        return next((why for factor, why in causes.items() if np.isclose(ratio, factor, rtol=1e-6)), "")

    def _cause(self, one: dict[str, np.ndarray], is_same_of_shard: bool) -> str:
        """Why a result may differ in another way than by a factor."""
        if self._is_random(one):
            return "random numbers depend on the number of devices, as keys folded with the rank: compare without noise"
        if not is_same_of_shard:
            return "it depends on the rank or the number of ranks, also where all have the same examples"
        for name, leaf in named_leaves(self.batch).items():
            if is_key(leaf) or not (leaf.dtype.kind in "biu" or np.isin(leaf, [0, 1]).all()):
                continue  # labels and masks may say which examples count
            alike = jax.tree.map(lambda one, leaf=leaf: self._alike(one) if one is leaf else one, self.batch)
            if self._agree(self._run(1, alike), self._run(batch=alike)):
                return f"a mean of the ranks' means, whose weights by batch leaf {name!r} differ: sum both, divide once"
        return "statistics of a rank's own examples, as BatchNorm's, or a loss that is no mean over examples"

    def _alike(self, leaf: Any) -> Any:
        """A leaf of the batch with the first rank's examples on every rank."""
        return jnp.concatenate([leaf[: len(leaf) // self.num_ranks]] * self.num_ranks)

    def _is_random(self, one: dict[str, np.ndarray]) -> bool:
        """Whether other keys give another result on one device."""
        given = self.state, self.batch
        others = jax.tree.map(lambda leaf: _other_key(leaf) if _draws_noise(leaf) else leaf, given)
        return any(map(_draws_noise, jax.tree.leaves(given))) and not self._agree(one, self._run(1, *others[::-1]))

    def _run(self, num_ranks: int | None = None, batch: Any = None, state: Any = None) -> dict[str, np.ndarray]:
        """What the step returns, by name; of all ranks and its own batch and state if not given."""
        mesh = data_mesh(num_ranks or self.num_ranks, axis=self.axis)
        batch, state = self.batch if batch is None else batch, self.state if state is None else state
        # A copy, which a step may donate; uncommitted, since pmap refuses what lies on a mesh.
        state = jax.tree.map(jnp.array, state)
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(self.axis)))
        found = named_leaves(jax.tree.map(jnp.asarray, jax.block_until_ready(self.make_step(mesh)(state, batch))))
        self._unlike = {name for name, leaf in found.items() if has_unlike_copies(leaf)}
        return {name: np.asarray(leaf) for name, leaf in found.items() if not is_key(leaf)}

    def _agree(self, one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
        return all(difference(other[name], leaf) <= self.atol for name, leaf in one.items())


def _before(one: dict[str, np.ndarray], old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the leaves of the next state were, by their names in a result, which has it at the path that holds most."""

    def found(start: str) -> dict[str, np.ndarray]:
        named = {start + path: leaf for path, leaf in old.items()}
        return {name: leaf for name, leaf in named.items() if name in one and one[name].shape == leaf.shape}

    starts = dict.fromkeys(name.removesuffix(path) for name in one for path in old)
    return max((found(start) for start in starts if start[-1:] in ("", ".") or "" in old), key=len, default={})


def _is_floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _draws_noise(leaf: Any) -> bool:
    """Whether a leaf is a PRNG key, of either kind."""
    return is_key(leaf) or (leaf.dtype == np.uint32 and leaf.shape == (2,))


def _other_key(key: Any) -> Any:
    keys = key.reshape(-1) if is_key(key) else key[None]
    return jax.vmap(jax.random.fold_in, (0, None))(keys, 7).reshape(key.shape)
