"""Whole parameters under ZeRO: each belongs to one rank, so that any optimizer that updates them one by one can run.

``zero1(shard="leaves")`` and ``zero2(shard="leaves")`` communicate gradients and parameters as without it, in shards of
every parameter. In between, an all-to-all collects the shards of each gradient on the rank that owns its parameter, and
another one returns the shards of the updated parameter. So the update sees whole parameters (Muon, Adafactor, LAMB),
however unequal they are, and the bulk of what is sent stays balanced.

    =============== ============================= =================================================
    tensor          on each rank                  bytes on each rank
    =============== ============================= =================================================
    parameter       ``[shape]``                   Psi
    gradient shards ``[c]``, c = ceil(n/N)        Psi / N
    owned gradients ``[N, w]``, row r of rank r   those of the fullest rank, padded: about Psi / N
    owned state     ``[width]``, one for a dtype  those of the fullest rank: about total / N
    other state     as the optimizer has it       that of no parameter: equal on all ranks
    =============== ============================= =================================================

    g[r]    = chunk r of every mean gradient                         as in stages 1 and 2
    G       = all-to-all of g: chunks of this rank's parameters      whole gradients of what this rank owns
    P, S    = optimizer(G, S, P)                                     branch r of a switch over the ranks
    p[r]    = all-to-all of P: chunk r of every parameter            then the all-gather of stages 1 and 2

    calls per step: two all-to-alls for each dtype, three with a ``compute_dtype``, whose masters are shards
    bytes sent per rank: about 1/N of the parameters' for each

The optimizer is traced once, for all parameters, so masks, labels and noise are those of one device; branch r is the
part of the trace that rank r's parameters need. An update that depends on another parameter is refused, and a loop over
several parameters, which is one operation. Every rank keeps what depends on no gradient and no parameter: counts, keys,
learning rates, and the arrays of one element that Adafactor has for state it does not need.

References:
    Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054 (section 5.1). Ahn et al., Dion: Distributed Orthonormalized
    Updates, arXiv:2504.05295.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from ..communication import gloo
from ..communication.buckets import Bucket, TensorSpec, assign_owners
from ..communication.collectives import is_silent, kind_of, traced_platform
from ..communication.sharding import cut, pack_row, pack_rows, unpack_row, unpack_rows
from ..communication.traces import TRANSPARENT, interpret
from ..layout import Leaf, cut_leaves, whole
from ..scopes import SYNC_SCOPE
from ..strategy import Layout, Optimizer, Ranks
from ..tree import like, named_leaves, path_name, split

_Label = tuple[str, Any]  # of an input or output: "grad" or "param" and a name, "state" and its place, or "value"
_Buffers = dict[str, jax.Array]  # by dtype


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
    state = OwnedState(owners.shared(_state(whole(owners.slots))), cut_leaves(buffers, num_ranks))
    on_rank = Optimizer(partial(owners.init, ranks.shard_axis), partial(owners.update, ranks.shard_axis))
    return Layout(ranks, params, cut_leaves(params, num_ranks), state, on_rank, trainable=trainable, owners=owners)


class LeafOwners:
    """An optimizer whose state is shared out by whole parameters.

    Attributes:
        num_ranks: N.
        owners: The rank of each parameter, by name.
        slots: The optimizer's state of full parameters, as ``jax.ShapeDtypeStruct``.
        param_of: The parameter whose owner has it, of each leaf of the state; None if all ranks have it.
        state_bytes: Bytes of optimizer state that each rank owns, without padding.
        widths: Elements of the fullest rank's state, by dtype.
        uses_grads: Whether anything depends on gradients; those of ``optax.set_to_zero`` are not sent to owners.
        swapped: Elements and dtype of the buffer of each all-to-all of one kind, ``[N, w]`` for a dtype of parameters.

    Example:
        >>> params = {"a": jnp.ones((4, 4)), "b": jnp.ones(6), "c": jnp.ones(9)}
        >>> leaves = LeafOwners(optax.sgd(0.1, momentum=0.9), params, num_ranks=2)
        >>> leaves.owners, leaves.widths
        ({'a': 0, 'b': 1, 'c': 1}, {'float32': 16})
    """

    def __init__(self, optimizer: optax.GradientTransformation, params: Any, num_ranks: int) -> None:
        """Assigns owners of the trainable ``params``, a tree of full arrays or ``jax.ShapeDtypeStruct``.

        Raises:
            ValueError: If an update or a leaf of the state depends on several parameters.
        """
        self.num_ranks, self._optimizer = num_ranks, optax.with_extra_args_support(optimizer)
        self._params = jax.eval_shape(lambda tree: tree, params)
        self.slots = jax.eval_shape(optimizer.init, self._params)
        leaves, (slots, self._structure) = named_leaves(self._params), jax.tree.flatten(self.slots)
        self._init = _Program.of(lambda given: _state(optimizer.init(self._tree("param", given))), _of("param", leaves))
        sources = self._update(jnp.float32).sources()
        self.param_of = self._params_of_state(sources)
        self.uses_grads = any(kind == "grad" for found in sources.values() for kind, _ in found)

        held, owned = dict.fromkeys(leaves, 0), {f"{at}": of for at, of in enumerate(self.param_of) if of is not None}
        states = {place: slots[int(place)] for place in owned}
        for place, param in owned.items():
            held[param] += states[place].size * states[place].dtype.itemsize
        costs = [(held[name], leaf.size * leaf.dtype.itemsize) for name, leaf in leaves.items()]
        self.owners = dict(zip(leaves, assign_owners(costs, [(0, 0)] * num_ranks), strict=True))
        self.state_bytes = [sum(held[name] for name in leaves if self.owners[name] == r) for r in range(num_ranks)]

        self._states = _buckets(states, {place: self.owners[param] for place, param in owned.items()}, num_ranks)
        self._buckets = _buckets(leaves, self.owners, num_ranks)
        self._cuts = {name: cut(leaf.shape, num_ranks) for name, leaf in leaves.items()}
        self._state_cuts = {place: cut(slot.shape, 1) for place, slot in states.items()}
        self.widths = {dtype: max(bucket.num_elements for bucket in buckets) for dtype, buckets in self._states.items()}
        self._row_widths = {
            dtype: max(sum(self._cuts[tensor.name].chunk for tensor in bucket.tensors) for bucket in buckets)
            for dtype, buckets in self._buckets.items()
        }
        self.swapped = [(num_ranks * width, dtype) for dtype, width in self._row_widths.items()]

    def init(self, axis: str, params: Any) -> OwnedState:
        """Makes this rank's part of the optimizer's state, of a tree of its shards."""
        rows = self._to_owners(axis, named_leaves(params))

        def of_owner(owner: int) -> _Buffers:
            return self._packed(owner, self._init.on(_of("param", self._whole(owner, rows)), self._places(owner)))

        first = self._init.on({}, self._places(None))
        return OwnedState(self.shared(first), self._switch(axis, of_owner))

    def update(
        self, axis: str, grads: Any, state: OwnedState, params: Any, value: jax.Array, full: Any = None
    ) -> tuple[Any, OwnedState]:
        """Updates parameters on their owners, where ``full`` is a tree of the full ones if every rank has them.

        ``grads`` and ``params`` are trees of this rank's shards, as is what it returns beside the next state.
        """
        program = self._update(value.dtype)
        shared = dict(zip(self._places(None), jax.tree.leaves(state.shared), strict=True)) | {("value", 0): value}
        grad_rows = self._to_owners(axis, named_leaves(grads))
        rows = self._to_owners(axis, named_leaves(params)) if full is None else {}

        def of_owner(owner: int) -> tuple[_Buffers, _Buffers]:
            held = self._whole(owner, rows) if full is None else named_leaves(full)
            given = shared | _of("grad", self._whole(owner, grad_rows)) | _of("param", held)
            new = [label for label in program.outputs if label[0] == "param" and self.owners[label[1]] == owner]
            found = program.on(given | self._unpacked(owner, state.owned), new + self._places(owner))
            return self._rows(owner, {name: found["param", name] for _, name in new}), self._packed(owner, found)

        sent, owned = self._switch(axis, of_owner)
        received = self._swap(axis, sent)
        shards: dict[str, jax.Array] = {}
        for dtype, buckets in self._buckets.items():
            for owner, bucket in enumerate(buckets):
                shards |= unpack_row(bucket, received[dtype][owner], self._cuts)
        return like(params, shards), OwnedState(self.shared(program.on(shared, self._places(None))), owned)

    def on_host(self, state: OwnedState, fetch: Callable[[Any], np.ndarray]) -> Any:
        """Unpacks a state over all ranks to one that ``init`` of the optimizer makes; what has owners is NumPy arrays.

        ``fetch`` copies a buffer ``[N * width]`` to the host.
        """
        rows = {dtype: fetch(buffer).reshape(self.num_ranks, -1) for dtype, buffer in state.owned.items()}
        found: dict[_Label, Any] = {}
        for owner in range(self.num_ranks):
            found |= self._unpacked(owner, {dtype: row[owner] for dtype, row in rows.items()})
        found |= zip(self._places(None), jax.tree.leaves(state.shared), strict=True)
        return jax.tree.unflatten(self._structure, [found[label] for label in sorted(found)])

    def from_host(self, state: Any) -> OwnedState:
        """Undoes ``on_host``: buffers ``[N * width]`` are NumPy arrays."""
        found, owned = _state(state), {}
        for dtype, buckets in self._states.items():
            rows = np.zeros((self.num_ranks, self.widths[dtype]), jnp.dtype(dtype))
            for row, bucket in zip(rows, buckets, strict=True):
                flat = [np.asarray(found["state", int(tensor.name)]).reshape(-1) for tensor in bucket.tensors]
                row[: bucket.num_elements] = np.concatenate(flat) if flat else 0
            owned[dtype] = rows.reshape(-1)
        return OwnedState(self.shared(found), owned)

    def shared(self, found: Mapping[_Label, Any]) -> Any:
        """The optimizer's state of its leaves by label, without those that have owners."""
        kept = [found["state", place] if param is None else None for place, param in enumerate(self.param_of)]
        return jax.tree.unflatten(self._structure, kept)

    def _update(self, value_dtype: Any) -> _Program:
        """Traces the update of all parameters."""

        def update(given: Mapping[_Label, jax.Array]) -> dict[_Label, jax.Array]:
            params, grads = self._tree("param", given), self._tree("grad", given)
            state = jax.tree.unflatten(self._structure, [given["state", place] for place in range(len(slots))])
            updates, new = self._optimizer.update(grads, state, params, value=given["value", 0])
            if len({jax.tree.structure(tree) for tree in (grads, updates)}) > 1 or _forms(state) != _forms(new):
                raise ValueError("optimizer's state and updates must keep one structure, and state its dtypes")
            return _of("param", named_leaves(optax.apply_updates(params, updates))) | _state(new)

        params, slots = named_leaves(self._params), jax.tree.leaves(self.slots)
        value = {("value", 0): jax.ShapeDtypeStruct((), value_dtype)}
        return _Program.of(update, _of("grad", params) | _of("param", params) | _state(self.slots) | value)

    def _params_of_state(self, sources: Mapping[_Label, frozenset[_Label]]) -> list[str | None]:
        """The parameter that each leaf of the state belongs to, on which alone its first and next value may depend."""
        names, first = [path_name(path) for path, _ in jax.tree.leaves_with_path(self.slots)], self._init.sources()
        found = {label: on | first.get(label, frozenset()) for label, on in sources.items()}
        param_of = [
            min((of for kind, of in found["state", place] if kind in ("grad", "param")), default=None)
            for place in range(len(names))
        ]
        for (kind, which), inputs in found.items():
            own, what = (param_of[which], names[which]) if kind == "state" else (which, which)
            on = {param_of[source] if of == "state" else source for of, source in inputs if of != "value"}
            if others := sorted(one for one in on - {own} if one is not None):
                raise ValueError(
                    f"optimizer must update each parameter by itself to be sharded by leaves: its {kind} {what!r}"
                    f" depends on {others[0]!r}; use a strategy that keeps the optimizer whole; to clip,"
                    " Trainer(max_grad_norm=...)"
                )
        return param_of

    def _switch(self, axis: str, of_owner: Callable[[int], Any]) -> Any:
        """What this rank computes of what it owns."""
        if self.num_ranks == 1:
            return of_owner(0)
        return lax.switch(lax.axis_index(axis), [partial(of_owner, owner) for owner in range(self.num_ranks)])

    def _tree(self, kind: str, given: Mapping[_Label, Any]) -> Any:
        return like(self._params, {name: leaf for (of, name), leaf in given.items() if of == kind})

    def _places(self, owner: int | None) -> list[_Label]:
        """The leaves of the state that a rank owns; of None, those that all have."""
        ranks = [None if param is None else self.owners[param] for param in self.param_of]
        return [("state", place) for place, rank in enumerate(ranks) if rank == owner]

    def _to_owners(self, axis: str, shards: Mapping[str, jax.Array]) -> _Buffers:
        """Sends shards to the owners of their parameters: row r is from rank r, ``[N, w]``."""
        rows = {
            dtype: jnp.stack([_row(bucket, shards, self._row_widths[dtype], dtype) for bucket in buckets])
            for dtype, buckets in self._buckets.items()
        }
        return self._swap(axis, rows)

    def _whole(self, owner: int, rows: _Buffers) -> dict[str, jax.Array]:
        """An owner's full arrays by name, of what ``_to_owners`` gave it."""
        full: dict[str, jax.Array] = {}
        for dtype, buckets in self._buckets.items():
            full |= unpack_rows(buckets[owner], rows[dtype], self._cuts)
        return full

    def _rows(self, owner: int, full: Mapping[str, jax.Array]) -> _Buffers:
        """Undoes ``_whole``."""
        rows = {}
        for dtype, buckets in self._buckets.items():
            empty = jnp.zeros((self.num_ranks, 0), dtype)
            row = pack_rows(buckets[owner], full, self._cuts) if buckets[owner].tensors else empty
            rows[dtype] = jnp.pad(row, ((0, 0), (0, self._row_widths[dtype] - row.shape[1])))
        return rows

    def _packed(self, owner: int, found: Mapping[_Label, jax.Array]) -> _Buffers:
        """Packs the state of an owner."""
        arrays = {f"{place}": array for (kind, place), array in found.items() if kind == "state"}
        return {
            dtype: _row(buckets[owner], arrays, self.widths[dtype], dtype) for dtype, buckets in self._states.items()
        }

    def _unpacked(self, owner: int, owned: Mapping[str, Any]) -> dict[_Label, Any]:
        """Undoes ``_packed``."""
        found: dict[_Label, Any] = {}
        for dtype, buckets in self._states.items():
            arrays = unpack_rows(buckets[owner], owned[dtype][None], self._state_cuts)
            found |= {("state", int(place)): array for place, array in arrays.items()}
        return found

    def _swap(self, axis: str, rows: _Buffers) -> _Buffers:
        if self.num_ranks == 1 or is_silent():
            return rows
        with jax.named_scope(SYNC_SCOPE):
            return {dtype: _all_to_all(row, axis) for dtype, row in rows.items()}


class _Program(NamedTuple):
    """A traced function of labelled arrays to labelled arrays."""

    traced: core.ClosedJaxpr
    inputs: list[_Label]
    outputs: list[_Label]

    @classmethod
    def of(cls, function: Callable[..., Any], given: Mapping[_Label, Any]) -> _Program:
        traced, found = jax.make_jaxpr(function, return_shape=True)(given)
        return cls(traced, sorted(given), sorted(found))  # the order in which JAX flattens dictionaries

    def sources(self) -> dict[_Label, frozenset[_Label]]:
        """Which inputs each output depends on."""
        return dict(zip(self.outputs, _sources(self.traced, [frozenset([one]) for one in self.inputs]), strict=True))

    def on(self, given: Mapping[_Label, jax.Array], wanted: Collection[_Label]) -> dict[_Label, jax.Array]:
        """Computes some of the outputs, by the part of the trace that they need."""
        wanted = frozenset(wanted)
        is_wanted = [label in wanted for label in self.outputs]
        jaxpr, is_used = partial_eval.dce_jaxpr(self.traced.jaxpr, is_wanted)
        # An operation of several parameters that are used apart is kept whole: zeros for the others.
        args = [
            given[label] if label in given else jnp.zeros(aval.shape, aval.dtype)
            for label, aval, used in zip(self.inputs, self.traced.in_avals, is_used, strict=True)
            if used
        ]
        values = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self.traced.consts))(*args)
        return dict(zip(itertools.compress(self.outputs, is_wanted), values, strict=True))


def _sources(program: core.ClosedJaxpr, inputs: Sequence[frozenset[_Label]]) -> list[frozenset[_Label]]:
    def rule(equation: Any, given: list[frozenset[_Label]]) -> list[frozenset[_Label]]:
        if equation.primitive.name == "optimization_barrier":
            return given
        if equation.primitive.name == "cond":
            branches = [_sources(branch, given[1:]) for branch in equation.params["branches"]]
            return [given[0].union(*options) for options in zip(*branches, strict=True)]
        return [frozenset().union(*given)] * len(equation.outvars)

    return interpret(program, inputs, rule, lambda *_: frozenset(), TRANSPARENT)


def _of(kind: str, leaves: Mapping[str, Any]) -> dict[_Label, Any]:
    return {(kind, name): leaf for name, leaf in leaves.items()}


def _state(state: Any) -> dict[_Label, Any]:
    return {("state", place): leaf for place, leaf in enumerate(jax.tree.leaves(state))}


def _forms(state: Any) -> Any:
    return jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def _buckets(leaves: Mapping[str, Any], owners: Mapping[str, int], num_ranks: int) -> dict[str, list[Bucket]]:
    """The arrays of each owner, by dtype."""
    found: dict[str, list[list[TensorSpec]]] = {}
    for name, leaf in leaves.items():
        of_ranks = found.setdefault(str(leaf.dtype), [[] for _ in range(num_ranks)])
        of_ranks[owners[name]].append(TensorSpec(name, leaf.shape, str(leaf.dtype)))
    return {dtype: [Bucket(tuple(tensors)) for tensors in of_ranks] for dtype, of_ranks in found.items()}


def _row(bucket: Bucket, arrays: Mapping[str, jax.Array], width: int, dtype: str) -> jax.Array:
    """Arrays one after another, padded to ``[width]``."""
    row = pack_row(bucket, arrays) if bucket.tensors else jnp.zeros(0, dtype)
    return jnp.pad(row, (0, width - row.size))


def _all_to_all(rows: jax.Array, axis: str) -> jax.Array:
    """Sends row o of ``[N, w]`` to rank o; row r of the result is from rank r."""
    if kind_of("all-to-all", rows.shape[0], traced_platform()) == "all-reduce":
        return gloo.all_to_all_by_swap(rows, axis)
    bits = traced_platform() == "cpu" and rows.dtype == jnp.bfloat16
    sent = lax.bitcast_convert_type(rows, jnp.uint16) if bits else rows
    received = lax.all_to_all(sent, axis, split_axis=0, concat_axis=0)
    return lax.bitcast_convert_type(received, rows.dtype) if bits else received
