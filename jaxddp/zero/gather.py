"""Shards of parameters, how the loss gathers them, by one collective each way, and in which order.

    forward    shards of a unit, packed [width]  -> all-gather      -> [N, width] -> full parameters
    backward   full gradients -> [N, width]      -> reduce-scatter  -> [width]    -> gradients of the shards

At most three units' parameters are gathered, or wait for their scatter, at a time. XLA may start the gathers of later
units at once, or let the backward run ahead of a reduce-scatter, and keep full tensors alive meanwhile. So an order
token (``communication/reduction.py``) makes unit u wait for unit u - 3, and its gradient orders the backward:

    forward    shards of u           wait for  results of u - 3             so its gather runs beside u - 2 and u - 1
    backward   gradients into u - 3  wait for  scattered gradients of u     so its scatter runs beside u - 1 and u - 2
               shards of u           wait for  gradients into u + 1         so its second gather runs beside u + 1
               a loop of units       waits for scattered gradients of the unit after it
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.sharding import PartitionSpec

from ..communication.collectives import all_gather, is_silent, silent
from ..communication.reduction import order_token
from ..communication.sharding import Cut, pack_row, pack_rows, scatter_sum, unpack_row, unpack_rows
from ..communication.traces import CALLS, CHECKPOINT, interpret
from ..layout import Leaf
from ..scopes import SYNC_SCOPE
from ..strategy import Ranks


class Shard(NamedTuple):
    """This rank's part of a parameter, or of a row of a stack."""

    local: jax.Array
    leaf: Any  # where the whole lies: a ``Leaf`` that is cut
    dtype: Any  # in which it is gathered
    grad_dtype: Any  # in which its gradient is summed over ranks; None if it has none

    def row(self, local: jax.Array) -> Shard:
        """This rank's part of a row of a stack."""
        leaf, whole = self.leaf, self.leaf.cut
        cut, spec = Cut(whole.shape[1:], whole.num_ranks, whole.dim - 1), PartitionSpec(*leaf.spec[1:])
        leaf = replace(leaf, shape=leaf.shape[1:], cut=cut, spec=spec, counts=leaf.counts[1:])
        return self._replace(local=local, leaf=leaf)


def stacked_dims(leaf: Leaf) -> int:
    """In how many leading dimensions a parameter is a stack, of which a rank has its part of every row."""
    if leaf.cut is None or leaf.cut.dim is None:
        return 0
    return next((dim for dim, axes in enumerate(leaf.spec[: leaf.cut.dim]) if axes), leaf.cut.dim)


def gather(
    program: core.ClosedJaxpr, places: Sequence[int], shards: list[Shard], ranks: Ranks, others: Sequence[Any] = ()
) -> tuple[list[Any], list[Any]]:
    """Gathers the parameters that a program takes at these places, by one all-gather per dtype.

    The transpose is one reduce-scatter per dtype. Returns the full parameters, and the ``others``, which a unit takes
    beside them.
    """
    quiet = silent if is_silent() else contextlib.nullcontext  # the backward is traced later, outside of the block
    dtypes, narrow = [shard.dtype for shard in shards], _cast(program, places)
    # XLA for GPUs would move a cast to a narrower dtype before the gather, and send less than planned. Parameters that
    # are cast already would be rounded once, and not twice.
    if narrow is not None and all(
        narrow.itemsize < one.dtype.itemsize and one.dtype == one.leaf.dtype for one in shards
    ):
        shards = [one._replace(dtype=narrow) for one in shards]
    groups: dict[Any, list[int]] = {}
    for place, shard in enumerate(shards):
        groups.setdefault((shard.dtype, shard.local.dtype), []).append(place)
    of_shards, of_full = [shard.leaf.shard_spec for shard in shards], [shard.leaf.spec for shard in shards]

    def by_group(function: Callable[..., Any], arrays: Sequence[Any], given: list[Any], wanted: list[Any]) -> list[Any]:
        """Calls a function on those of one dtype at a time, without what is None."""
        found: list[Any] = [None] * len(arrays)
        for group in groups.values():
            if some := [place for place in group if arrays[place] is not None]:
                chosen, ins, outs, values = ([of[place] for place in some] for of in (shards, given, wanted, arrays))
                with quiet():
                    results = ranks.on_devices(partial(function, chosen, ranks), (ins,), outs)(values)
                found = put(found, some, results)
        return found

    def forward(local: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
        return by_group(_all_gather, local, of_shards, of_full), others

    def forward_of(local: list[Any], others: list[Any]) -> tuple[Any, list[tuple[()] | None]]:
        # What wants a gradient, as () or None: JAX treats both as structure, where a bool would be an array.
        is_wanted = [one.perturbed and shard.grad_dtype is not None for one, shard in zip(local, shards, strict=True)]
        wanted = [() if one else None for one in (*is_wanted, *(other.perturbed for other in others))]
        return forward([one.value for one in local], [one.value for one in others]), wanted

    def backward(wanted: list[tuple[()] | None], grads: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        found = [
            None if wants is None or isinstance(grad, SymbolicZero) else grad
            for wants, grad in zip(wanted, itertools.chain(*grads), strict=True)
        ]
        # Else XLA computes the gradients of activations first, for all units, and keeps what those of parameters need.
        if others:
            found = lax.optimization_barrier(found)
        return by_group(_reduce_scatter, found[: len(shards)], of_full, of_shards), found[len(shards) :]

    gathered = jax.custom_vjp(forward)
    gathered.defvjp(forward_of, backward, symbolic_zeros=True)
    full, others = gathered([shard.local for shard in shards], list(others))
    return [array.astype(dtype) for array, dtype in zip(full, dtypes, strict=True)], others


def _cast(program: core.ClosedJaxpr, places: Sequence[int]) -> Any:
    """The floating dtype to which a program casts each of these inputs, once and before any other use; else None."""
    uses: list[tuple[int, Any]] = []  # a place, and the dtype that it is cast to; None if it is used otherwise

    def rule(equation: Any, inputs: list[int | None]) -> list[None]:
        dtype = equation.params["new_dtype"] if equation.primitive.name == "convert_element_type" else None
        uses.extend((place, dtype) for place in inputs if place is not None)
        return [None] * len(equation.outvars)

    given = [place if place in places else None for place in range(len(program.jaxpr.invars))]
    # Not into custom_vjp and the like, whose derivatives may use what their programs cast.
    results = interpret(program, given, rule, lambda *_: None, (*CALLS, CHECKPOINT))
    uses += [(place, None) for place in results if place is not None]
    dtypes = {dtype for _, dtype in uses}
    is_each_once = sorted(place for place, _ in uses) == sorted(places) and len(dtypes) == 1
    dtype = dtypes.pop() if is_each_once else None
    return dtype if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else None


@jax.named_scope(SYNC_SCOPE)
def _all_gather(shards: list[Shard], ranks: Ranks, local: list[jax.Array]) -> list[jax.Array]:
    cuts = dict(enumerate(shard.leaf.cut for shard in shards))
    rows = all_gather(pack_row(local, cuts).astype(shards[0].dtype), ranks.shard_axis, as_bits=True)
    return [*unpack_rows(rows, cuts).values()]


@jax.named_scope(SYNC_SCOPE)
def _reduce_scatter(shards: list[Shard], ranks: Ranks, grads: list[jax.Array]) -> list[jax.Array]:
    cuts = dict(enumerate(shard.leaf.cut for shard in shards))
    rows = pack_rows([grad.astype(one.grad_dtype) for one, grad in zip(shards, grads, strict=True)], cuts)
    parts = unpack_row(scatter_sum(rows, ranks.shard_axis, ranks.replica_axes), cuts)
    return [parts[place].astype(one.leaf.dtype) for place, one in enumerate(shards)]


def put(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values, with others in some places."""
    values = list(values)
    for place, other in zip(places, others, strict=True):
        values[place] = other
    return values


@dataclass
class Order:
    """Tokens that the units of a program have left for those after them."""

    # Of each unit, available after its results. If two of the first three units waited for the same, XLA would gather
    # what both use once, and hold it.
    tokens: list[Any] = field(default_factory=lambda: [None, order_token((), 1.0)[1], order_token((), 2.0)[1]])
    early: Any = None  # of the last unit, if the backward computes it again: its gradient comes before its results'
    of_loop: Any = None  # of a loop just before, whose backward waits for its gradient


def in_order(order: Order, unit: Callable[..., tuple[list[Any], Any]], shards: list[jax.Array]) -> list[Any]:
    """Runs a unit, ``shards -> (results, early or None)``, whose shards wait for the results of the third last one."""
    token, early = order.tokens[-3], order.early
    if order.of_loop is not None:
        shards, order.of_loop = _on_floats(_give_back, shards, order.of_loop)[0], None
    if token is not None:
        shards, token = _on_floats(_wait, shards, token)
    results, order.early = unit(shards)
    results, after = _on_floats(_release, results, jnp.zeros(()))
    order.tokens.append(after)
    if early is not None:
        results, _ = _on_floats(_give_back, results, early)
    return results if token is None else _on_floats(_use, results, token)[0]


def after_loop(order: Order, carry: list[Any]) -> list[Any]:
    """What a loop over units hands on, whose backward begins once the gradients of the unit after it are scattered."""
    # XLA would scatter them after the loop, in which units scatter as well, and not beside that unit.
    carry, order.of_loop = _on_floats(_release, carry, jnp.zeros(()))
    return carry


def computed_again(compute: Callable[..., list[Any]], policy: Any) -> Callable[..., tuple[list[Any], jax.Array]]:
    """A unit of which the backward gathers the parameters again, and computes what the forward has not kept.

    The barrier of ``jax.checkpoint`` would make the shards wait for the gradients of the results. Here they wait for
    the gradient of ``early`` alone, which the next unit gives as it begins: a unit is ``inputs -> (results, early)``.
    """
    checkpointed = jax.checkpoint(compute, policy=policy, prevent_cse=False)

    def unit(inputs: list[Any]) -> tuple[list[Any], jax.Array]:
        return checkpointed(inputs), jnp.zeros(())

    def forward(inputs: list[Any]) -> tuple[Any, Any]:
        values, places = [one.value for one in inputs], [place for place, one in enumerate(inputs) if one.perturbed]
        of_perturbed = [values[place] for place in places]
        results, pull = jax.vjp(lambda some: checkpointed(put(values, places, some)), of_perturbed)
        return (results, jnp.zeros(())), (pull, [() if one.perturbed else None for one in inputs])

    def backward(kept: Any, grads: tuple[list[Any], Any]) -> tuple[list[Any]]:
        (pull, wanted), (of_results, early) = kept, grads
        held, structure = jax.tree.flatten(pull)
        # Without a unit after it, nothing is early: what is held waits for the gradients.
        if isinstance(early, SymbolicZero):
            _, early = order_token([grad for grad in of_results if not isinstance(grad, SymbolicZero)], 0.0)
        pull = jax.tree.unflatten(structure, _on_floats(_hold, held, early)[0])
        found = iter(pull([*map(_instantiated, of_results)])[0])
        return ([None if one is None else next(found) for one in wanted],)

    marked = jax.custom_vjp(unit)
    marked.defvjp(forward, backward, symbolic_zeros=True)
    return marked


def _instantiated(grad: Any) -> Any:
    if not isinstance(grad, SymbolicZero):
        return grad
    return (np if grad.dtype == jax.dtypes.float0 else jnp).zeros(grad.shape, grad.dtype)


def _on_floats(function: Callable[..., Any], arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], Any]:
    """Calls ``function(arrays, token)`` on those that have gradients."""
    places = [place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
    found, token = function([arrays[place] for place in places], token)
    return put(arrays, places, found), token


def _barrier(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    return lax.optimization_barrier((arrays, token))


def _use(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    # XLA drops unused barrier outputs, so the token is used; one of the arrays will do. It gets no gradient.
    return [array + lax.stop_gradient(token).astype(array.dtype) for array in arrays[:1]] + arrays[1:], token


def _hold(arrays: list[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The arrays wait for the token."""
    return _use(*_barrier(arrays, token))


def _linked(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays and a token, whose gradients are what another one gives of theirs."""
    linked = jax.custom_vjp(forward)
    linked.defvjp(lambda arrays, token: (forward(arrays, token), None), lambda _, grads: backward(*grads))
    return linked


_wait = _linked(_barrier, _barrier)  # arrays wait for the token; in the backward, the token for their gradients
_release = _linked(_barrier, _hold)  # the token waits for arrays; in the backward, their gradients for the token
# In the backward, the gradient of the token is a zero that waits for those of the arrays.
_give_back = _linked(lambda arrays, token: (arrays, token), _barrier)
