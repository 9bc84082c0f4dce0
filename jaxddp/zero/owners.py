"""Whole parameters under ZeRO: each belongs to one rank, so that any optimizer that updates them one by one can run.

``shard="leaves"`` reduces and gathers shards of every parameter, as without it. In between, all-to-alls collect whole
gradients on the ranks that own their parameters, and return updated parameters:

    =============== ============================= =================================================
    tensor          on each rank                  bytes on each rank
    =============== ============================= =================================================
    parameter       ``[shape]``                   Psi
    gradient shards ``[c]``, c = ceil(n/N)        Psi / N
    owned gradients ``[N, w]``, row r of rank r   those of the fullest rank, padded: about Psi / N
    owned state     ``[width]``, one for a dtype  those of the fullest rank: about total / N
    other state     as the optimizer has it       that of no parameter: equal on all ranks
    =============== ============================= =================================================

    g[r]  = shard r of every mean gradient                         as in stages 1 and 2
    G     = all-to-all of g: shards of this rank's parameters      whole gradients of what this rank owns
    P, S  = optimizer(G, S, P)                                     branch r of a switch over the ranks
    p[r]  = all-to-all of P: shard r of every parameter            then the all-gather of stages 1 and 2

    calls per step: two all-to-alls for each dtype, three with a ``compute_dtype``; each sends about 1/N of Psi

The optimizer is traced once, for all parameters; branch r is the part of the trace that rank r's parameters need.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from ..communication.buckets import assign_owners
from ..communication.collectives import all_to_all, is_silent
from ..communication.sharding import Cut, cut, unpack_row, unpack_rows
from ..communication.traces import TRANSPARENT, interpret
from ..layout import Leaf, cut_leaves, whole
from ..scopes import SYNC_SCOPE
from ..strategy import Layout, Optimizer, Ranks
from ..tree import like, named_leaves, split

_Arrays = dict[str, Any]  # by name, or buffers by dtype


class OwnedState(NamedTuple):
    """The optimizer's state where whole parameters have owners."""

    shared: Any  # as the optimizer made it, equal on all ranks, with None for each leaf that has an owner
    owned: dict[str, Any]  # the others, by dtype: of this rank one after another, [width]; [N * width] over all ranks


def layout_by_owners(
    params: Any, optimizer: Any, ranks: Ranks, trainable: Callable[[str], bool] | None = None
) -> Layout:
    """Every rank has all parameters, shards of the gradients, and the optimizer's state of the parameters it owns."""
    if ranks.other_axes:
        raise ValueError("shard (='leaves') must be 'elements' with param_specs, which split leaves over devices")
    full = jax.tree.map(lambda leaf: leaf.held, split(params, trainable)[0])
    owners, num_ranks = LeafOwners(optimizer, full, ranks.num_shards), ranks.num_shards
    buffers = {dtype: Leaf((num_ranks * width,), jnp.dtype(dtype)) for dtype, width in owners.widths.items()}
    state = OwnedState(owners.shared(named_leaves(whole(owners.slots))), cut_leaves(buffers, num_ranks))
    on_rank = Optimizer(partial(owners.init, ranks.shard_axis), partial(owners.update, ranks.shard_axis))
    return Layout(ranks, params, cut_leaves(params, num_ranks), state, on_rank, trainable=trainable, owners=owners)


class LeafOwners:
    """An optimizer whose state is shared out by whole parameters."""

    def __init__(self, optimizer: optax.GradientTransformation, params: Any, num_ranks: int) -> None:
        """Assigns owners of the trainable ``params``, a tree of full arrays or ``jax.ShapeDtypeStruct``.

        Refuses an optimizer if an update or a leaf of its state depends on several parameters, as in a loop over them.
        """
        self.num_ranks, self._optimizer = num_ranks, optax.with_extra_args_support(optimizer)
        self._params = jax.eval_shape(lambda tree: tree, params)
        self.slots = jax.eval_shape(optimizer.init, self._params)  # the state of full parameters
        leaves, slots = named_leaves(self._params), named_leaves(self.slots)
        self._init, program = jax.make_jaxpr(optimizer.init)(self._params), self._update(jnp.float32)
        # By name of a leaf of the state: the parameter whose owner has it; None if all ranks have it, like a count.
        self.param_of = self._params_of_state(program)
        # Gradients that nothing depends on, as in ``optax.set_to_zero``, are not sent to owners.
        _, is_used = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.out_avals))
        self.uses_grads = any(is_used[: len(leaves)])

        held = dict.fromkeys(leaves, 0)
        for name, param in self.param_of.items():
            if param is not None:
                held[param] += slots[name].size * slots[name].dtype.itemsize
        costs = [(held[name], leaf.size * leaf.dtype.itemsize) for name, leaf in leaves.items()]
        self.owners = dict(zip(leaves, assign_owners(costs, [(0, 0)] * num_ranks), strict=True))

        self._state_owners = {name: None if of is None else self.owners[of] for name, of in self.param_of.items()}
        owned = {name: slots[name] for name, owner in self._state_owners.items() if owner is not None}
        self._states = _Packing(owned, self._state_owners, num_ranks, num_parts=1)
        self._leaves = _Packing(leaves, self.owners, num_ranks, num_parts=num_ranks)
        self.widths = self._states.widths  # elements of the fullest rank's state, by dtype
        # Elements and dtype of the buffer of each all-to-all of one kind.
        self.swapped = [(num_ranks * width, dtype) for dtype, width in self._leaves.widths.items()]

    def init(self, axis: str, params: Any) -> OwnedState:
        """Makes this rank's part of the optimizer's state, of a tree of its shards."""
        rows = self._swap(axis, self._leaves.pack_shards(named_leaves(params)))

        def state_of(owner: int | None, full: _Arrays) -> _Arrays:
            return self._compute(self._init, [*map(full.get, self.owners)], owner, self._state_owners)[0]

        owned = self._switch(axis, lambda owner: self._flat(owner, state_of(owner, self._leaves.unpack(owner, rows))))
        return OwnedState(self.shared(state_of(None, {})), owned)

    def update(
        self, axis: str, grads: Any, state: OwnedState, params: Any, value: jax.Array, full: Any = None
    ) -> tuple[Any, OwnedState]:
        """Takes trees of this rank's shards, and gives one; ``full`` has the full ones if every rank has them."""
        program, shared = self._update(value.dtype), self._by_name(state.shared)
        grad_rows = self._swap(axis, self._leaves.pack_shards(named_leaves(grads)))
        param_rows = self._swap(axis, self._leaves.pack_shards(named_leaves(params))) if full is None else {}

        def compute(owner: int | None, grads: _Arrays, states: _Arrays, params: _Arrays) -> list[_Arrays]:
            given = [*map(grads.get, self.owners), *states.values(), *map(params.get, self.owners), value]
            return self._compute(program, given, owner, self.owners, self._state_owners)

        def of_owner(owner: int) -> tuple[_Arrays, _Arrays]:
            held = self._leaves.unpack(owner, param_rows) if full is None else named_leaves(full)
            states = shared | self._states.unpack(owner, state.owned)
            new, new_states = compute(owner, self._leaves.unpack(owner, grad_rows), states, held)
            return self._leaves.pack(owner, new), self._flat(owner, new_states)

        sent, owned = self._switch(axis, of_owner)
        shards = self._leaves.unpack_shards(self._swap(axis, sent))
        return like(params, shards), OwnedState(self.shared(compute(None, {}, shared, {})[1]), owned)

    def on_host(self, state: OwnedState, fetch: Callable[[Any], np.ndarray]) -> Any:
        """Unpacks a state over all ranks to the optimizer's own; ``fetch`` copies a buffer ``[N * width]`` to NumPy."""
        rows = {dtype: fetch(buffer).reshape(self.num_ranks, -1) for dtype, buffer in state.owned.items()}
        found = self._by_name(state.shared)
        for owner in range(self.num_ranks):
            found |= self._states.unpack(owner, {dtype: row[owner] for dtype, row in rows.items()})
        return like(self.slots, found)

    def from_host(self, state: Any) -> OwnedState:
        """Undoes ``on_host``: buffers ``[N * width]`` are NumPy arrays."""
        slots = named_leaves(self.slots)
        found = {
            name: leaf if self.param_of[name] is None else np.asarray(leaf).astype(slots[name].dtype)
            for name, leaf in named_leaves(state).items()
        }
        rows = [self._flat(owner, found) for owner in range(self.num_ranks)]
        owned = {dtype: np.concatenate([row[dtype] for row in rows]) for dtype in self.widths}
        return OwnedState(self.shared(found), owned)

    def shared(self, states: Mapping[str, Any]) -> Any:
        """The optimizer's state of its leaves by name, without those that have owners."""
        return like(self.slots, {name: states[name] if of is None else None for name, of in self.param_of.items()})

    def _by_name(self, shared: Any) -> _Arrays:
        """Undoes ``shared``: None for each leaf that has an owner."""
        leaves = iter(jax.tree.leaves(shared))
        return {name: next(leaves) if of is None else None for name, of in self.param_of.items()}

    def _update(self, value_dtype: Any) -> core.ClosedJaxpr:
        """Traces the update of all parameters."""

        def update(grads: Any, state: Any, params: Any, value: jax.Array) -> tuple[Any, Any]:
            updates, new = self._optimizer.update(grads, state, params, value=value)
            if len({jax.tree.structure(tree) for tree in (grads, updates)}) > 1 or _forms(state) != _forms(new):
                raise ValueError("optimizer's state and updates must keep one structure, and state its dtypes")
            return optax.apply_updates(params, updates), new

        value = jax.ShapeDtypeStruct((), value_dtype)
        return jax.make_jaxpr(update)(self._params, self.slots, self._params, value)

    def _params_of_state(self, update: core.ClosedJaxpr) -> dict[str, str | None]:
        """The parameter that each leaf of the state belongs to, on which alone its first and next value may depend."""
        params, states = [*named_leaves(self._params)], [*named_leaves(self.slots)]
        nothing, each = frozenset[str](), [frozenset([name]) for name in params]

        def sources(of_state: list[frozenset[str]]) -> list[frozenset[str]]:
            """The parameters that each updated parameter depends on, and each leaf of the state."""
            first = [nothing] * len(params) + _sources(self._init, each)
            return [*map(frozenset.union, first, _sources(update, [*each, *of_state, *each, nothing]))]

        param_of = [min(found, default=None) for found in sources([nothing] * len(states))[len(params) :]]
        of_state = [nothing if param is None else frozenset([param]) for param in param_of]
        labels = [f"param {name!r}" for name in params] + [f"state {name!r}" for name in states]
        for label, own, found in zip(labels, [*each, *of_state], sources(of_state), strict=True):
            if others := sorted(found - own):
                raise ValueError(
                    f"optimizer must update each parameter by itself to be sharded by leaves: its {label}"
                    f" depends on {others[0]!r}; use a strategy that keeps the optimizer whole; to clip,"
                    " Trainer(max_grad_norm=...)"
                )
        return dict(zip(states, param_of, strict=True))

    def _switch(self, axis: str, of_owner: Callable[[int], Any]) -> Any:
        """What this rank computes of what it owns."""
        return lax.switch(lax.axis_index(axis), [partial(of_owner, owner) for owner in range(self.num_ranks)])

    def _compute(
        self, program: core.ClosedJaxpr, given: Sequence[Any], owner: int | None, *kinds: Mapping[str, Any]
    ) -> list[_Arrays]:
        """Outputs that an owner has, by the part of a program that they need, by kind and name; None for the others."""
        is_wanted = [one == owner for kind in kinds for one in kind.values()]
        jaxpr, is_used = partial_eval.dce_jaxpr(program.jaxpr, is_wanted)
        # An operation of several parameters that are used apart is kept whole: zeros for the others.
        args = [
            jnp.zeros(aval.shape, aval.dtype) if array is None else jnp.asarray(array, aval.dtype)
            for array, aval, used in zip(given, program.in_avals, is_used, strict=True)
            if used
        ]
        found = iter(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, program.consts))(*args))
        return [{name: next(found) if one == owner else None for name, one in kind.items()} for kind in kinds]

    def _flat(self, owner: int, states: _Arrays) -> _Arrays:
        return {dtype: row.reshape(-1) for dtype, row in self._states.pack(owner, states).items()}

    def _swap(self, axis: str, rows: _Arrays) -> _Arrays:
        if self.num_ranks == 1 or is_silent():
            return rows
        with jax.named_scope(SYNC_SCOPE):
            return {dtype: all_to_all(row, axis, as_bits=True) for dtype, row in rows.items()}


class _Packing:
    """How arrays that have owners are packed: each is cut in some parts, and there is a buffer for each dtype."""

    def __init__(self, leaves: Mapping[str, Any], owners: Mapping[str, Any], num_ranks: int, num_parts: int) -> None:
        self.num_parts = num_parts
        self.cuts: dict[str, list[dict[str, Cut]]] = {}  # by dtype, of the arrays of each owner
        for name, leaf in leaves.items():
            of_owners = self.cuts.setdefault(str(leaf.dtype), [{} for _ in range(num_ranks)])
            of_owners[owners[name]][name] = cut(leaf.shape, num_parts)
        self.widths = {  # by dtype, elements of one part of all that the fullest owner has
            dtype: max(sum(one.chunk for one in cuts.values()) for cuts in of_owners)
            for dtype, of_owners in self.cuts.items()
        }

    def pack(self, owner: int, full: _Arrays) -> _Arrays:
        """Packs an owner's arrays to ``[parts, width]``, padded with zeros."""
        found = {}
        for dtype, cuts in self.cuts.items():
            rows = [one.to_rows(full[name]) for name, one in cuts[owner].items()]
            found[dtype] = self._joined(dtype, rows, self.num_parts)
        return found

    def unpack(self, owner: int, rows: _Arrays) -> _Arrays:
        """Undoes ``pack``."""
        found = [unpack_rows(rows[dtype], cuts[owner]) for dtype, cuts in self.cuts.items()]
        return dict(ChainMap(*found))

    def pack_shards(self, shards: _Arrays) -> _Arrays:
        """Packs a rank's shards of all arrays: row o of ``[N, width]`` holds those of what owner o has."""
        found = {}
        for dtype, of_owners in self.cuts.items():
            rows = [[shards[name].reshape(1, -1) for name in cuts] for cuts in of_owners]
            found[dtype] = jnp.concatenate([self._joined(dtype, row, 1) for row in rows])
        return found

    def unpack_shards(self, rows: _Arrays) -> _Arrays:
        """Undoes ``pack_shards``."""
        pairs = [pair for dtype, of_owners in self.cuts.items() for pair in zip(rows[dtype], of_owners, strict=True)]
        return dict(ChainMap(*(unpack_row(row, cuts) for row, cuts in pairs)))

    def _joined(self, dtype: str, rows: list[jax.Array], num_rows: int) -> jax.Array:
        numpy = np if all(isinstance(row, np.ndarray) for row in rows) else jnp
        padding = self.widths[dtype] - sum(row.shape[1] for row in rows)
        return numpy.concatenate([*rows, numpy.zeros((num_rows, padding), jnp.dtype(dtype))], axis=1)


def _sources(program: core.ClosedJaxpr, inputs: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Which parameters each output of a program depends on, given those of its inputs."""

    def rule(equation: Any, given: list[frozenset[str]]) -> list[frozenset[str]]:
        if equation.primitive.name == "optimization_barrier":
            return given
        if equation.primitive.name == "cond":
            branches = [_sources(branch, given[1:]) for branch in equation.params["branches"]]
            return [given[0].union(*options) for options in zip(*branches, strict=True)]
        return [frozenset().union(*given)] * len(equation.outvars)

    return interpret(program, inputs, rule, lambda *_: frozenset(), TRANSPARENT)


def _forms(state: Any) -> Any:
    return jax.tree.structure(state), [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(state)]
