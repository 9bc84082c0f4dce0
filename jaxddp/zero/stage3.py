"""ZeRO stage 3 (fully sharded data parallelism): parameters are sharded as well.

A unit, which is a function under ``jaxddp.layer`` (a layer, the embedding, the head), gathers its parameters when it
runs, drops them, and gathers them again in the backward; the transpose of a gather is a reduce-scatter.

    ===================== ============= =====================================
    tensor                on each rank  bytes on each rank, AdamW, fp32
    ===================== ============= =====================================
    sharded parameter     a shard       4 Psi / N, and up to three full units
    its gradient          a shard       4 Psi / N, and up to three full units
    its moments           shards        8 Psi / N
    replicated parameter  ``[shape]``   16 Psi, with gradient and moments
    ===================== ============= =====================================

    forward   of unit u:  p = all-gather of p[r]           y = u(p, x)                 drop p
    backward  of unit u:  p = all-gather of p[r]           dx, dp = u'(p, x, dy)       drop p
                          g[r] = row r of the sum over ranks of dp                     reduce-scatter, drop dp
    update                p[r] += optimizer(g[r] / N, state[r], p[r])

    gathers per step, U units: 2U - 1 in a loop, 2U under a scan; less one for each unit such as an embedding, whose
                               backward needs no parameters
    bytes sent per rank:       3 (N-1)/N * parameter bytes, less those that are gathered once

The loss is traced on full parameters, and every unit is one operation of the trace. Run on shards, units gather theirs,
loops over a stack take rows of its shards, and parameters that anything else uses are gathered before the forward.
The last unit of a loss, or of a checkpoint around it, keeps what it gathered, since the backward begins there.

References:
    Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, arXiv:2304.11277.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ..arguments import check_integer
from ..communication.buckets import BucketMb, plan_buckets
from ..communication.reduction import Means, divide
from ..communication.traces import CALLS, CHECKPOINT, bind, called_program, interpret, nested, num_consts_and_carry
from ..ddp import all_reduce_grads, of_optax, update_full
from ..layout import Leaf, cut_leaf
from ..strategy import Layout, Ranks, Strategy, register
from ..tree import named_leaves, split
from .elementwise import shard_state
from .gather import Order, Shard, after_loop, computed_again, gather, in_order, put, stacked_dims

_is_marking: ContextVar[bool] = ContextVar("jaxddp_is_marking", default=False)


@register
def zero3(*, min_shard_elements: int = 4096, bucket_mb: BucketMb = "default") -> Strategy:
    """Shards parameters: all-gathers them, and reduce-scatters their gradients, unit by unit.

    Args:
        min_shard_elements: Parameters with fewer elements stay full on every rank; their gradients are all-reduced.
        bucket_mb: Cap of the buckets of replicated gradients; see ``plan_buckets``, which raises as this does.
    """
    least = max(check_integer("min_shard_elements", min_shard_elements, least=0), 1)
    plan_buckets([], bucket_mb)  # refuses a bad cap now, not at the first step
    plan, layout = partial(plan_buckets, bucket_mb=bucket_mb), partial(layout_params, least)
    return Strategy("zero3", plan, layout, loss_on_shards, divide_shards, update_full, gathers_in_loss=True)


def layout_params(
    least: int, params: Any, optimizer: Any, ranks: Ranks, trainable: Callable[[str], bool] | None = None
) -> Layout:
    """Every rank has a shard of each large parameter, and updates what it has."""

    def held(leaf: Leaf) -> Leaf:
        is_small, dims = math.prod(leaf.block) < least, range(len(leaf.shape))
        # Dimension 0 is cut last: a parameter may be a stack of layers, of which one row is gathered at a time.
        return leaf if is_small else cut_leaf(leaf, ranks.num_shards, [*dims[1:], *dims[:1]])

    updated = jax.tree.map(held, params)
    state = shard_state(optimizer, split(updated, trainable)[0])
    return Layout(ranks, updated, updated, state, of_optax(optimizer), trainable=trainable)


def loss_on_shards(loss: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Turns a loss function of full parameters, in the compute dtype, into one of what a rank holds."""
    ranks, leaves = layout.ranks, named_leaves(layout.params)

    def used(leaf: Leaf) -> jax.ShapeDtypeStruct:
        is_cast = layout.compute_dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, layout.compute_dtype if is_cast else leaf.dtype)

    full = jax.tree.map(used, layout.params)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(full)]
    is_trained = layout.trainable or (lambda name: True)
    grad_dtypes = [layout.grad_dtypes[name] if is_trained(name) else None for name in leaves]

    def loss_of_shards(params: Any, *inputs: Any) -> Any:
        token = _is_marking.set(True)
        try:
            program, result = jax.make_jaxpr(loss, return_shape=True)(full, *inputs)
        finally:
            _is_marking.reset(token)
        held = zip(jax.tree.leaves(params), leaves.values(), dtypes, grad_dtypes, strict=True)
        values = [
            Shard(array, leaf, dtype, grad_dtype) if leaf.cut else array.astype(dtype)
            for array, leaf, dtype, grad_dtype in held
        ] + jax.tree.leaves(inputs)
        stacked = [stacked_dims(one.leaf) if isinstance(one, Shard) else None for one in values]
        if early := sorted(_used_outside(program, stacked)):
            values = put(values, early, gather(program, early, [values[at] for at in early], ranks)[0])
        if early and ranks.num_ranks > 1 and not any(isinstance(one, Shard) for one in values):
            warnings.warn(
                "zero3 gathers all parameters before the forward: mark the layers of the model with jaxddp.layer",
                stacklevel=1,  # one place, so that Python shows it once
            )
        return jax.tree.unflatten(jax.tree.structure(result), _run_units(program, values, ranks, is_end=True))

    return loss_of_shards


def divide_shards(grads: Mapping[str, jax.Array], plan: Any, layout: Layout, divisor: Any, number: Any = None) -> Means:
    """The backward has summed the gradients of shards; those of small parameters are all-reduced."""
    small = {name: grad for name, grad in grads.items() if name not in layout.held}
    means = all_reduce_grads(layout.ranks, None, small, plan, divisor, number).grads
    return Means({name: divide(grad, divisor) for name, grad in grads.items() if name in layout.held} | means)


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as one unit of a model, whose parameters ``zero3`` gathers, uses and drops.

    Call it in a loop over layers, or in the body of ``lax.scan`` over a stack of them; inside of ``lax.cond``,
    ``lax.switch`` and ``lax.while_loop`` it marks nothing. Other strategies run ``fn`` as it is. A unit saves results
    of matrix products for the backward; with ``jax.checkpoint``, inside or around, only its inputs (``docs/zero.md``).

    Args:
        fn: ``(layer_params, *args)``, all trees of arrays, ``->`` a tree of arrays. Pass the model's parameters
            unchanged, or what ``lax.scan`` takes of a stack. What it changes in variables of Flax NNX is kept.
    """

    @functools.wraps(fn)
    def unit(*args: Any, **kwargs: Any) -> Any:
        if not _is_marking.get():
            return fn(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))

        def jaxddp_layer(arrays: dict[int, jax.Array]) -> Any:
            given = [arrays.get(at, leaf) for at, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, given)
            results = fn(*args, **kwargs)
            after = jax.tree.leaves((args, kwargs))
            found: Any = jax.tree.structure((args, kwargs))
            if found != structure:
                raise ValueError("a function under jaxddp.layer must not add to its arguments or remove from them")
            pairs = enumerate(zip(after, given, strict=True))
            return results, {at: new for at, (new, old) in pairs if isinstance(new, jax.Array) and new is not old}

        arrays = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
        results, changed = jax.jit(jaxddp_layer)(arrays)
        _write((args, kwargs), changed)
        return results

    return unit


def _write(args: Any, changed: Mapping[int, Any]) -> None:
    """Writes what a unit has changed in copies of its arguments, such as running means, into Flax NNX's variables."""
    nodes = jax.tree.leaves(args, is_leaf=lambda node: hasattr(node, "set_value"))
    places = [node for node in nodes for _ in jax.tree.leaves(node)]
    for at, value in changed.items():
        if not hasattr(places[at], "set_value") or len(jax.tree.leaves(places[at])) > 1:
            raise ValueError("a function under jaxddp.layer must return what it changes in its arguments")
        places[at].set_value(value)


def _used_outside(program: core.ClosedJaxpr, stacked: Sequence[int | None]) -> set[int]:
    """The places of shards that anything but units uses; ``stacked``: ``stacked_dims`` of each input, None if none."""
    outside: set[int] = set()
    inputs = [None if dims is None else place for place, dims in enumerate(stacked)]

    def rule(equation: Any, inputs: list[int | None]) -> list[None]:
        uses = {} if _is_unit(equation) else {at: place for at, place in enumerate(inputs) if place is not None}
        inner: dict[int, int | None] = {}  # what of them a program takes that is looked into
        if equation.primitive.name in (*CALLS, CHECKPOINT):
            inner = {at: stacked[place] for at, place in uses.items()}
        elif equation.primitive.name == "scan":
            first = sum(num_consts_and_carry(equation))
            inner = {at: (stacked[place] or 0) - 1 for at, place in uses.items() if at >= first and stacked[place]}
        of_inner = _used_outside(called_program(equation), [*map(inner.get, range(len(inputs)))]) if inner else set()
        outside.update(place for at, place in uses.items() if at not in inner or at in of_inner)
        return [None] * len(equation.outvars)

    return outside | {one for one in interpret(program, inputs, rule, lambda *_: None) if one is not None}


def _run_units(
    program: core.ClosedJaxpr, inputs: Sequence[Any], ranks: Ranks, *,
    is_end: bool, in_loop: bool = False, order: Order | None = None,
) -> list[Any]:  # fmt: skip
    """Runs a marked program, some of whose inputs are a ``Shard`` that only units use.

    ``is_end``: whether the backward begins with it. ``in_loop``: whether forward and backward are loops, between which
    XLA finds no equal operations; else barriers keep it from using what the forward has gathered. ``order``: of the
    units before it whose values can be used here.
    """
    order = Order() if order is None else order
    last = next((equation for equation in reversed(program.jaxpr.eqns) if any(map(_is_unit, nested(equation)))), None)

    def rule(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        places = [place for place, one in enumerate(inputs) if isinstance(one, Shard)]
        if not places:
            return bind(program.jaxpr, equation, inputs)
        name, params, inner = equation.primitive.name, equation.params, called_program(equation)
        keeps, is_unit = is_end and equation is last, _is_unit(equation)
        if name == "scan":
            return _run_scan(equation, inputs, ranks, order, is_end=keeps, in_loop=in_loop)
        if name in CALLS and not is_unit:
            return _run_units(inner, inputs, ranks, is_end=keeps, in_loop=in_loop, order=order)
        shards = [inputs[place] for place in places]
        others = [place for place, one in enumerate(inputs) if isinstance(one, jax.Array)]
        # Its gradients are scattered while those of its results are computed, so they do not wait for these.
        follows_loop = order.of_loop is not None

        def compute(values: list[jax.Array]) -> list[Any]:
            own: Any = [shard._replace(local=array) for shard, array in zip(shards, values, strict=False)]
            arrays = values[len(shards) :]
            if not is_unit:
                return _run_units(inner, put(put(inputs, places, own), others, arrays), ranks, is_end=True)
            own, waited = gather(inner, places, own, ranks, [] if follows_loop else arrays)
            arrays = arrays if follows_loop else waited
            return core.jaxpr_as_fun(inner)(*put(put(inputs, places, own), others, arrays))

        if not is_unit:
            compute = jax.checkpoint(compute, policy=params["policy"], prevent_cse=params["prevent_cse"])
        elif in_loop and not keeps:
            compute = jax.checkpoint(compute, policy=_policy(inner), prevent_cse=False)
        is_again = is_unit and not keeps and not in_loop
        unit = computed_again(compute, _policy(inner)) if is_again else lambda values: (compute(values), None)
        arrays = [inputs[place] for place in others]
        return in_order(order, lambda local: unit([*local, *arrays]), [shard.local for shard in shards])

    return interpret(program, inputs, rule)


def _policy(unit: core.ClosedJaxpr) -> Callable[..., Any] | None:
    """What a unit keeps for the backward: what a checkpoint in it says, else the results of its products."""
    # The checkpoint around a unit does not ask the policy of the user's.
    given = (one.params["policy"] for one in unit.jaxpr.eqns if one.primitive.name == CHECKPOINT)
    return next(given, jax.checkpoint_policies.dots_saveable)


def _run_scan(
    equation: Any, inputs: list[Any], ranks: Ranks, order: Order, *, is_end: bool, in_loop: bool
) -> list[Any]:
    """Runs a loop over rows of shards; if XLA makes none of it, as if its rounds were written out."""
    params, program, (num_consts, num_carry) = equation.params, called_program(equation), num_consts_and_carry(equation)
    consts, carry, stacks = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]
    is_shard = [isinstance(stack, Shard) for stack in stacks]
    local = [stack.local if cut else stack for stack, cut in zip(stacks, is_shard, strict=True)]

    def run_round(carry: list[Any], local: Sequence[jax.Array], **options: Any) -> tuple[list[Any], list[Any]]:
        rows = [stack.row(row) if cut else row for stack, row, cut in zip(stacks, local, is_shard, strict=True)]
        results = _run_units(program, [*consts, *carry, *rows], ranks, **options)
        return results[:num_carry], results[num_carry:]

    if params["length"] <= params["unroll"]:
        numbers = [*range(params["length"])][:: -1 if params["reverse"] else 1]
        rounds: dict[int, list[Any]] = {}
        for number in numbers:
            rows, is_last = [array[number] for array in local], is_end and number == numbers[-1]
            carry, rounds[number] = run_round(carry, rows, is_end=is_last, in_loop=in_loop, order=order)
        return [*carry, *map(jnp.stack, zip(*(rounds[number] for number in sorted(rounds)), strict=True))]

    places = [place for place, cut in enumerate(is_shard) if cut]
    held = [local[place] for place in places]
    row = None
    # Along other axes, gradients of one row would have to lie alike.
    if len({one.dtype for one in held}) == 1 and jnp.issubdtype(held[0].dtype, jnp.floating) and not ranks.other_axes:
        row = _gradients_from_rows(held)
        local = put(local, places, lax.stop_gradient(held))

    def body(carry: list[Any], given: tuple[list[jax.Array], jax.Array | None]) -> tuple[list[Any], list[Any]]:
        local, row = given
        if row is not None:
            local = put(local, places, _gradients_to_row([local[place] for place in places], row))
        return run_round(carry, local, is_end=False, in_loop=True)

    # Rounds that are left over would be no loop.
    unroll = max(n for n in range(1, params["unroll"] + 1) if params["length"] % n == 0)
    carry, results = lax.scan(body, carry, (local, row), params["length"], params["reverse"], unroll)
    # Gradients of the stacked results may be known to be zeros, and behind a barrier no longer are.
    return [*after_loop(order, carry), *results]


# The gradients of a round's shards are one row of one stack, zeros before the backward: then XLA scatters them while
# the next round computes, which it does not where a scatter's result is divided among several stacks or, on TPUs, where
# its parts are reshaped to one dimension before they are joined again.
def _rows_of(stacks: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([stack.reshape(len(stack), -1) for stack in stacks], axis=1)


@jax.custom_vjp
def _gradients_from_rows(stacks: list[jax.Array]) -> jax.Array:
    """Zeros ``[rounds, elements]``, whose gradients become those of the stacks, ``[rounds, ...]``."""
    return jnp.zeros_like(jax.eval_shape(_rows_of, stacks))


_gradients_from_rows.defvjp(
    lambda stacks: (_gradients_from_rows(stacks), stacks),
    lambda stacks, rows: jax.linear_transpose(_rows_of, stacks)(rows),
)


@jax.custom_vjp
def _gradients_to_row(arrays: list[jax.Array], row: jax.Array) -> list[jax.Array]:
    """The arrays, whose gradients become that of the row."""
    return arrays


_gradients_to_row.defvjp(
    lambda arrays, row: (arrays, None), lambda _, grads: (None, _rows_of([grad[None] for grad in grads])[0])
)


def _is_unit(equation: Any) -> bool:
    return equation.primitive.name == "jit" and equation.params["name"] == "jaxddp_layer"
