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
    other state     as the optimizer has it       counts, learning rates: equal on all ranks
    =============== ============================= =================================================

    g[r]    = chunk r of every mean gradient                         as in stages 1 and 2
    G       = all-to-all of g: chunks of this rank's parameters      whole gradients of what this rank owns
    P, S    = optimizer(G, S, P)                                     branch r of a switch over the ranks
    p[r]    = all-to-all of P: chunk r of every parameter            then the all-gather of stages 1 and 2

    calls per step: two all-to-alls for each dtype, three with a ``compute_dtype``, whose masters are shards
    bytes sent per rank: about 1/N of the parameters' for each

All ranks run one program. The optimizer is traced once, for all parameters under their own names, so masks and labels
see what they would see on one device; branch r computes only what rank r owns. Owners balance the bytes of optimizer
state, the largest parameter first (``communication/owners.py``).

An update that depends on another parameter is refused, except for ``jaxddp.clip_by_global_norm``: its norms are
computed before the update, a switch and an all-reduce of a scalar for each.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
    arXiv:1910.02054 (section 5.1).
    Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv:2504.05295.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ..communication.backward_order import TRANSPARENT
from ..communication.buckets import chunk_elements
from ..communication.collectives import all_reduce, is_silent
from ..communication.owners import assign_owners
from ..communication.reduction import sum_of_squares
from ..communication.sharding import cut
from ..interpreter import called_program, num_consts_and_carry
from ..layout import Leaf
from ..scopes import METRICS_SCOPE, SYNC_SCOPE
from ..strategy import Layout, Optimizer, Ranks
from ..tree import like, named_leaves, path_name, split
from .clipping import norms_as_inputs, on_full
from .shards import cut_leaves

_REFUSAL = (
    "optimizer must update each parameter by itself to be sharded by leaves: its {} depends on {}; use a strategy"
    " that keeps the optimizer whole, or, if it clips, jaxddp.clip_by_global_norm"
)

_Label = tuple[str, Any]  # of an input or output: its kind, and its name or place


class OwnedState(NamedTuple):
    """The optimizer's state where whole parameters have owners.

    Attributes:
        shared: The state as the optimizer made it, equal on all ranks, with None for each leaf that has an owner.
        owned: The others, by dtype: those of this rank one after another, ``[width]``; ``[N * width]`` over all ranks.
    """

    shared: Any
    owned: dict[str, Any]


@dataclass(frozen=True)
class Slot:
    """Where a leaf of the optimizer's state lies.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        param: The parameter whose owner has it; None if all ranks have it.
        offset: Its first element in the owner's buffer.
    """

    shape: tuple[int, ...]
    dtype: Any
    param: str | None = None
    offset: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def layout_by_owners(
    params: Any, optimizer: Any, ranks: Ranks, trainable: Callable[[str], bool] | None = None
) -> Layout:
    """Every rank has all parameters, shards of the gradients, and the optimizer's state of the parameters it owns."""
    if ranks.other_axes:
        raise ValueError("shard (='leaves') must be 'elements' with param_specs, which split leaves over devices")
    full = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), split(params, trainable)[0])
    owners = LeafOwners(optimizer, full, ranks.num_shards)
    shared = jax.tree.map(lambda slot: Leaf(slot.shape, slot.dtype) if slot.param is None else None, owners.slots)
    owned = {dtype: _buffer(ranks.num_shards, width, dtype) for dtype, width in owners.widths.items()}
    axis = ranks.shard_axis
    return Layout(
        ranks,
        params,
        cut_leaves(params, ranks),
        OwnedState(shared, owned),
        Optimizer(
            lambda params: owners.init(params, axis),
            lambda grads, state, params, value, full=None: owners.update(grads, state, params, value, axis, full),
        ),
        trainable=trainable,
        owners=owners,
    )


def _buffer(num_ranks: int, width: int, dtype: str) -> Leaf:
    shape = (num_ranks * width,)
    return Leaf(shape, jnp.dtype(dtype), cut(shape, num_ranks))


class LeafOwners:
    """An optimizer whose state is shared out by whole parameters.

    Attributes:
        params: Full trainable parameters by name, as ``jax.ShapeDtypeStruct``.
        num_ranks: N.
        owners: The rank of each parameter, by name.
        slots: A tree like the optimizer's state, of ``Slot``.
        widths: Elements of the fullest rank's buffer, by dtype.
        uses_grads: Whether anything depends on gradients; those of ``optax.set_to_zero`` are not sent to owners.

    Example:
        >>> params = {"a": jnp.ones((4, 4)), "b": jnp.ones(6), "c": jnp.ones(9)}
        >>> leaves = LeafOwners(optax.sgd(0.1, momentum=0.9), params, num_ranks=2)
        >>> leaves.owners, leaves.widths
        ({'a': 0, 'b': 1, 'c': 1}, {'float32': 16})
    """

    def __init__(self, optimizer: optax.GradientTransformation, params: Any, num_ranks: int) -> None:
        """Assigns owners.

        Args:
            optimizer: Traced, not run.
            params: Full trainable parameters: a tree of arrays or ``jax.ShapeDtypeStruct``.
            num_ranks: N.

        Raises:
            ValueError: If an update or a leaf of the state depends on more than one parameter.
        """
        self._optimizer = optax.with_extra_args_support(optimizer)
        self._tree = jax.eval_shape(lambda tree: tree, params)
        self.params, self.num_ranks = named_leaves(self._tree), num_ranks
        self._init = _Program.of_init(optimizer.init, self._tree)
        state = jax.eval_shape(optimizer.init, self._tree)
        slots = [Slot(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
        self._structure = jax.tree.structure(state)
        self._names = [path_name(path) for path, _ in jax.tree.leaves_with_path(state)]
        update = self._update(jnp.float32)
        of_param = self._params_of(update, slots)
        self.uses_grads = any(update.sources([kind == "grad" for kind, _ in update.inputs]).values())
        self._state_bytes = dict.fromkeys(self.params, 0)
        for slot, param in zip(slots, of_param, strict=True):
            if param is not None:
                self._state_bytes[param] += slot.size * slot.dtype.itemsize
        costs = [(self._state_bytes[name], leaf.size * leaf.dtype.itemsize) for name, leaf in self.params.items()]
        self.owners = dict(zip(self.params, assign_owners(costs, [(0, 0)] * num_ranks), strict=True))
        filled: dict[str, list[int]] = {}
        for place, param in enumerate(of_param):
            if param is not None:
                held = filled.setdefault(str(slots[place].dtype), [0] * num_ranks)
                slots[place] = replace(slots[place], param=param, offset=held[self.owners[param]])
                held[self.owners[param]] += slots[place].size
        self.slots = jax.tree.unflatten(self._structure, slots)
        self.widths = {dtype: max(held) for dtype, held in filled.items() if max(held)}
        self._rows: dict[str, list[dict[str, slice]]] = {}  # by dtype and owner: the columns of its parameters' chunks
        for name, leaf in self.params.items():
            rows = self._rows.setdefault(str(leaf.dtype), [{} for _ in range(num_ranks)])[self.owners[name]]
            start = max((columns.stop for columns in rows.values()), default=0)
            rows[name] = slice(start, start + chunk_elements(leaf.size, num_ranks))

    @property
    def state_bytes(self) -> list[int]:
        """Bytes of optimizer state that each rank owns, without what pads them to those of the fullest."""
        held = [0] * self.num_ranks
        for name, num_bytes in self._state_bytes.items():
            held[self.owners[name]] += num_bytes
        return held

    @property
    def swapped(self) -> list[tuple[int, str]]:
        """Elements and dtype of the buffer of each all-to-all of one kind, ``[N, w]`` for each dtype of parameters."""
        return [(self.num_ranks * self._width(dtype), dtype) for dtype in self._rows]

    def init(self, params: Any, axis: str) -> OwnedState:
        """Makes this rank's part of the optimizer's state.

        Args:
            params: A tree of this rank's shards.
            axis: Name of the mesh axis.
        """
        held = _Held(params=self._whole(params, axis, are_full=False))
        first = self._init.on(held, self._shared_places())
        owned = self._on_owners(self._init, axis, held, self._owned_places, self._packed)
        return OwnedState(self._shared(first), owned)

    def update(
        self,
        grads: Any,
        state: OwnedState,
        params: Any,
        value: jax.Array,
        axis: str,
        full: Any = None,
    ) -> tuple[Any, OwnedState]:
        """Updates parameters on their owners.

        Args:
            grads: A tree of this rank's shards of the mean gradients.
            state: This rank's.
            params: A tree of this rank's shards of the parameters.
            value: The loss.
            axis: Name of the mesh axis.
            full: A tree of the full parameters if every rank has them, else None.

        Returns:
            This rank's shards of the updated parameters, and the next state.
        """
        program = self._update(value.dtype)
        held = _Held(
            grads=self._whole(grads, axis, False),
            params=self._whole(params if full is None else full, axis, full is not None),
            state=dict(zip((place for _, place in self._shared_places()), jax.tree.leaves(state.shared), strict=True)),
            owned=state.owned,
            value=value,
        )
        for place, dtype in enumerate(program.norms):
            wanted = partial(self._owned_names, f"norm {place}")

            def squares(owner: int, found: dict[Any, jax.Array], held: Any, dtype: Any = dtype) -> jax.Array:
                del owner, held
                return sum_of_squares(found.values()).astype(dtype)

            total = self._on_owners(program, axis, held, wanted, squares)
            with jax.named_scope(METRICS_SCOPE):
                total = all_reduce(total, axis) if self.num_ranks > 1 else total
            held = held._replace(norms=(*held.norms, jnp.sqrt(total)))
        shared = self._shared(program.on(held, self._shared_places()))

        def wanted_of(owner: int) -> list[Any]:
            return self._owned_names("update", owner) + self._owned_places(owner)

        rows, owned = self._on_owners(program, axis, held, wanted_of, self._updated)
        chunks = self._swap(rows, axis)
        shards = {
            name: chunks[dtype][owner, columns]
            for dtype, rows in self._rows.items()
            for owner, row in enumerate(rows)
            for name, columns in row.items()
        }
        shards = {name: chunk.reshape(cut(self.params[name].shape, self.num_ranks).shard_shape)
                  for name, chunk in shards.items()}  # fmt: skip
        return like(params, shards), OwnedState(shared, owned)

    def on_host(self, state: OwnedState, fetch: Callable[[Any], np.ndarray]) -> Any:
        """Unpacks a state over all ranks.

        Args:
            state: Over all ranks.
            fetch: Copies a buffer ``[N * width]`` to the host.

        Returns:
            The optimizer's state as its ``init`` makes it; what has owners is NumPy arrays.
        """
        rows = {dtype: fetch(buffer).reshape(self.num_ranks, -1) for dtype, buffer in state.owned.items()}
        shared = iter(jax.tree.leaves(state.shared))

        def leaf(slot: Slot) -> Any:
            if slot.param is None:
                return next(shared)
            if slot.size == 0:
                return np.zeros(slot.shape, slot.dtype)
            row = rows[str(slot.dtype)][self.owners[slot.param]]
            return row[slot.offset : slot.offset + slot.size].reshape(slot.shape)

        return jax.tree.map(leaf, self.slots)

    def from_host(self, state: Any) -> OwnedState:
        """Undoes ``on_host``: buffers ``[N * width]`` are NumPy arrays."""
        rows = {dtype: np.zeros((self.num_ranks, width), jnp.dtype(dtype)) for dtype, width in self.widths.items()}
        shared = []
        for slot, leaf in zip(jax.tree.leaves(self.slots), jax.tree.leaves(state), strict=True):
            shared.append(leaf if slot.param is None else None)
            if slot.param is not None and slot.size:
                row = rows[str(slot.dtype)][self.owners[slot.param]]
                row[slot.offset : slot.offset + slot.size] = np.asarray(leaf).reshape(-1)
        owned = {dtype: row.reshape(-1) for dtype, row in rows.items()}
        return OwnedState(jax.tree.unflatten(self._structure, shared), owned)

    def _update(self, value_dtype: Any) -> _Program:
        """Traces the update, with its norms over all parameters as inputs."""
        optimizer, params = self._optimizer, self._tree
        state = jax.eval_shape(optimizer.init, params)
        value = jax.ShapeDtypeStruct((), value_dtype)

        def update(norms: Any, grads: Any, state: Any, params: Any, value: Any) -> tuple[Any, Any, Any]:
            with norms_as_inputs(norms) as operands, on_full(self._tree):
                updates, new_state = optimizer.update(grads, state, params, value=value)
            for given, found in ((grads, updates), (state, new_state)):
                if len({jax.tree.structure(given), jax.tree.structure(found)}) > 1:
                    raise ValueError("optimizer's state and updates must keep one structure")
            return updates, new_state, list(operands)

        def trace(norms: Any) -> tuple[core.ClosedJaxpr, Any]:
            return jax.make_jaxpr(update, return_shape=True)(norms, params, state, params, value)

        rule = "clip_by_global_norm must not be inside of a loop, a branch or jit where leaves have owners"
        try:
            traced, shapes = trace(None)
            norms = [jax.eval_shape(lambda leaves: jnp.sqrt(sum_of_squares(leaves.values())), one) for one in shapes[2]]
            if norms:
                traced, shapes = trace(norms)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(f"optimizer's {rule}") from error
        if any(isinstance(const, jax.core.Tracer) for const in traced.consts):  # or it escapes as a constant
            raise ValueError(f"optimizer's {rule}")
        inputs = [
            *(("norm", place) for place in range(len(norms))),
            *(("grad", name) for name in self.params),
            *(("state", place) for place in range(len(self._names))),
            *(("param", name) for name in self.params),
            ("value", 0),
        ]
        updates, new_state, operands = shapes
        outputs = [
            *(("update", name) for name in named_leaves(updates)),
            *(("state", place) for place in range(len(jax.tree.leaves(new_state)))),
            *((f"norm {place}", name) for place, leaves in enumerate(operands) for name in leaves),
        ]
        return _Program(traced, inputs, outputs, [norm.dtype for norm in norms])

    def _params_of(self, update: _Program, slots: Sequence[Slot]) -> list[str | None]:
        """Finds the parameter that each leaf of the state belongs to, by what it depends on and what depends on it.

        Raises:
            ValueError: If something depends on more than one parameter.
        """
        bits: dict[_Label, int] = {("grad", name): 1 << place for place, name in enumerate(self.params)}
        bits |= {("param", name): bits["grad", name] for name in self.params}
        bits |= {("state", place): 1 << len(self.params) + place for place in range(len(slots))}
        found = update.sources([bits.get(label, 0) for label in update.inputs])
        first = self._init.sources([bits[label] for label in self._init.inputs])
        dtypes = dict(zip(update.outputs, (aval.dtype for aval in update.traced.out_avals), strict=True))
        names = list(self.params)
        are_params = (1 << len(names)) - 1
        of_param: list[str | None] = [None] * len(slots)
        for place in range(len(slots)):
            direct = (found["state", place] | first["state", place]) & are_params
            on = [name for at, name in enumerate(names) if direct >> at & 1]
            if len(on) > 1:
                raise ValueError(_REFUSAL.format(f"state {self._names[place]!r}", f"{on[0]!r} and {on[1]!r}"))
            of_param[place] = on[0] if on else None
        for place, slot in enumerate(slots):  # such as a copy of the first parameters, which only their updates read
            reads = {
                label[1] if label[0] == "update" else of_param[label[1]]
                for label, mask in found.items()
                if label[0] in ("update", "state") and label != ("state", place) and mask & bits["state", place]
            } - {None}
            is_key = jnp.issubdtype(slot.dtype, jax.dtypes.extended)
            if of_param[place] is None and slot.size > 1 and len(reads) == 1 and not is_key:
                of_param[place] = reads.pop()
        for (kind, which), mask in found.items():
            param = of_param[which] if kind == "state" else which
            depends: set[str | None] = {name for at, name in enumerate(names) if mask >> at & 1}
            depends |= {owner for place, owner in enumerate(of_param) if mask & bits["state", place]}
            if others := sorted(name for name in depends - {param} if name is not None):
                what = f"state {self._names[which]!r}" if kind == "state" else f"update of {which!r}"
                raise ValueError(_REFUSAL.format(what, repr(others[0])))
            if kind == "state" and param is not None and dtypes[kind, which] != slots[which].dtype:
                both = f"{slots[which].dtype}, then {dtypes[kind, which]}"
                raise ValueError(f"optimizer's state {self._names[which]!r} (={both}) must keep its dtype")
        return of_param

    def _on_owners(
        self,
        program: _Program,
        axis: str,
        held: _Held,
        wanted: Callable[[int], list[Any]],
        finish: Callable[[int, dict[Any, jax.Array], _Held], Any],
    ) -> Any:
        """Evaluates outputs of a program on the ranks that own them."""

        def branch(owner: int, held: _Held) -> Any:
            mine = held._replace(
                grads=self._of_owner(held.grads, owner),
                params=self._of_owner(held.params, owner),
                state={**held.state, **self._unpacked(held.owned, owner)},
            )
            return finish(owner, program.on(mine, wanted(owner)), mine)

        branches = [partial(branch, owner) for owner in range(self.num_ranks)]
        return lax.switch(lax.axis_index(axis), branches, held) if self.num_ranks > 1 else branches[0](held)

    def _updated(self, owner: int, found: dict[Any, jax.Array], held: _Held) -> tuple[Any, Any]:
        """Packs the updated parameters of an owner, ``[N, w]`` by dtype, and its next state."""
        rows = {}
        for dtype, of_ranks in self._rows.items():
            chunks = [jnp.zeros((self.num_ranks, 0), dtype)]
            for name in of_ranks[owner]:
                one = {name: held.params[name]}
                new = optax.apply_updates(one, {name: found["update", name]})[name]
                chunks.append(cut(new.shape, self.num_ranks).to_rows(new))
            row = jnp.concatenate(chunks, axis=1)
            rows[dtype] = jnp.pad(row, ((0, 0), (0, self._width(dtype) - row.shape[1])))
        return rows, self._packed(owner, found, held)

    def _packed(self, owner: int, found: dict[Any, jax.Array], held: _Held) -> dict[str, jax.Array]:
        """Packs the state of an owner."""
        del held
        slots, buffers = jax.tree.leaves(self.slots), {}
        for dtype, width in self.widths.items():
            places = [place for _, place in self._owned_places(owner) if str(slots[place].dtype) == dtype]
            row = jnp.concatenate([jnp.zeros(0, dtype), *(found["state", place].reshape(-1) for place in places)])
            buffers[dtype] = jnp.pad(row, (0, width - row.size))
        return buffers

    def _unpacked(self, owned: Mapping[str, jax.Array], owner: int) -> dict[int, jax.Array]:
        """Undoes ``_packed``; the state of step 0 is not there yet."""
        slots = jax.tree.leaves(self.slots)
        found = {}
        for _, place in self._owned_places(owner) if owned else ():
            slot = slots[place]
            if slot.size:
                row = lax.slice_in_dim(owned[str(slot.dtype)], slot.offset, slot.offset + slot.size)
                found[place] = row.reshape(slot.shape)
        return found

    def _whole(self, tree: Any, axis: str, are_full: bool) -> Any:
        """Collects what ranks own: full arrays by name, or ``_Rows`` of what this rank owns."""
        leaves = named_leaves(tree)
        if are_full:
            return leaves
        rows = {}
        for dtype, of_ranks in self._rows.items():
            row_of = [
                jnp.concatenate([jnp.zeros(0, dtype), *(leaves[name].reshape(-1) for name in row)]) for row in of_ranks
            ]
            rows[dtype] = jnp.stack([jnp.pad(row, (0, self._width(dtype) - row.size)) for row in row_of])
        return _Rows(self._swap(rows, axis))

    def _of_owner(self, held: Any, owner: int) -> Mapping[str, jax.Array]:
        """Gives the full arrays of an owner by name, from what ``_whole`` returns."""
        if not isinstance(held, _Rows):
            return held
        return {
            name: cut(self.params[name].shape, self.num_ranks).from_rows(held.by_dtype[dtype][:, columns])
            for dtype, of_ranks in self._rows.items()
            for name, columns in of_ranks[owner].items()
        }

    def _swap(self, rows: dict[str, jax.Array], axis: str) -> dict[str, jax.Array]:
        if self.num_ranks == 1 or is_silent():
            return rows
        with jax.named_scope(SYNC_SCOPE):
            return {dtype: _all_to_all(row, axis) for dtype, row in rows.items()}

    def _width(self, dtype: str) -> int:
        return max(columns.stop for row in self._rows[dtype] for columns in row.values())

    def _owned_names(self, kind: str, owner: int) -> list[_Label]:
        return [(kind, name) for name, rank in self.owners.items() if rank == owner]

    def _owned_places(self, owner: int) -> list[_Label]:
        slots = enumerate(jax.tree.leaves(self.slots))
        return [
            ("state", place) for place, slot in slots if slot.param is not None and self.owners[slot.param] == owner
        ]

    def _shared_places(self) -> list[_Label]:
        return [("state", place) for place, slot in enumerate(jax.tree.leaves(self.slots)) if slot.param is None]

    def _shared(self, found: dict[Any, jax.Array]) -> Any:
        leaves = [found.get(("state", place)) for place in range(len(self._names))]
        return jax.tree.unflatten(self._structure, leaves)


class _Rows(NamedTuple):
    """Row r of each is rank r's chunks of the parameters that this rank owns."""

    by_dtype: Mapping[str, jax.Array]  # [N, w]


class _Held(NamedTuple):
    """What a rank computes an update from; gradients and parameters by name, or as ``_Rows``."""

    grads: Any = {}
    params: Any = {}
    state: Mapping[int, jax.Array] = {}  # by place
    owned: Mapping[str, jax.Array] = {}
    value: Any = None
    norms: tuple[jax.Array, ...] = ()

    def get(self, kind: str, which: Any) -> Any:
        if kind == "value":
            return self.value
        if kind == "norm":
            return self.norms[which] if which < len(self.norms) else None
        return {"grad": self.grads, "param": self.params, "state": self.state}[kind].get(which)


class _Program(NamedTuple):
    """A traced function, its inputs and outputs labelled by kind and name or place."""

    traced: core.ClosedJaxpr
    inputs: list[_Label]
    outputs: list[_Label]
    norms: list[Any] = []  # dtypes of the norms over all parameters that it takes

    @classmethod
    def of_init(cls, init: Callable[..., Any], params: Any) -> _Program:
        traced = jax.make_jaxpr(init)(params)
        places = range(len(traced.out_avals))
        return cls(traced, [("param", name) for name in named_leaves(params)], [("state", place) for place in places])

    def sources(self, bits: Sequence[int]) -> dict[_Label, int]:
        """Which inputs each output depends on."""
        return dict(zip(self.outputs, _sources(self.traced, bits), strict=True))

    def on(self, held: _Held, wanted: Sequence[_Label]) -> dict[_Label, jax.Array]:
        """Computes some of the outputs."""
        is_wanted = [label in set(wanted) for label in self.outputs]
        jaxpr, is_used = partial_eval.dce_jaxpr(self.traced.jaxpr, is_wanted)
        used = [(label, var) for label, var, use in zip(self.inputs, self.traced.in_avals, is_used, strict=True) if use]
        # An operation of several parameters that are used apart, such as a loop, is kept whole: zeros for the others.
        given = [held.get(*label) for label, _ in used]
        given = [jnp.zeros(aval.shape, aval.dtype) if one is None else one
                 for one, (_, aval) in zip(given, used, strict=True)]  # fmt: skip
        values = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self.traced.consts))(*given)
        return dict(zip([label for label, is_one in zip(self.outputs, is_wanted, strict=True) if is_one], values,
                        strict=True))  # fmt: skip


def _sources(program: Any, inputs: Sequence[int]) -> list[int]:
    """Which inputs each output of a traced program depends on, as unions of the inputs' bits."""
    jaxpr = getattr(program, "jaxpr", program)
    masks = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else masks.get(atom, 0)

    for equation in jaxpr.eqns:
        masks.update(zip(equation.outvars, _results(equation, list(map(read, equation.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _results(equation: Any, given: list[int]) -> list[int]:
    name, inner = equation.primitive.name, list(core.jaxprs_in_params(equation.params))
    if name == "optimization_barrier":
        return given
    if name in TRANSPARENT and len(inner) == 1 and len(inner[0].invars) == len(given):
        return _sources(inner[0], given)
    if name == "cond":
        options = [_sources(branch, given[1:]) for branch in equation.params["branches"]]
        return [functools.reduce(operator.or_, option, given[0]) for option in zip(*options, strict=True)]
    if name == "scan":
        num_consts, num_carry = num_consts_and_carry(equation)
        while True:
            results = _sources(called_program(equation), given)
            carry = slice(num_consts, num_consts + num_carry)
            grown = [mask | more for mask, more in zip(given[carry], results, strict=False)]
            if grown == given[carry]:
                return results
            given = [*given[:num_consts], *grown, *given[num_consts + num_carry :]]
    return [functools.reduce(operator.or_, given, 0)] * len(equation.outvars)


def _all_to_all(rows: jax.Array, axis: str) -> jax.Array:
    """Sends row o of ``[N, w]`` to rank o; row r of the result is from rank r."""
    if gloo.kind_of("all-to-all", rows.shape[0], gloo.traced_platform()) == "all-reduce":
        return gloo.all_to_all_by_swap(rows, axis)
    bits = gloo.traced_platform() == "cpu" and rows.dtype == jnp.bfloat16
    sent = lax.bitcast_convert_type(rows, jnp.uint16) if bits else rows
    received = lax.all_to_all(sent, axis, split_axis=0, concat_axis=0)
    return lax.bitcast_convert_type(received, rows.dtype) if bits else received
