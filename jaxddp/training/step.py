"""What each rank computes in one training step. Read it next to ``plain.py``: the strategy's functions, by name.

on each rank                     shape
-------------------------------  -------------------------------------------------------
params, optimizer state          full, equal on all ranks, or this rank's shards
model state, key                 full, equal on all ranks
batch                            [global_batch / num_ranks, ...]

    grads  = sum over micro-batches of d loss / d params
    grads  = strategy.reduce(grads)                  mean over ranks, or over weights: all of it, or this rank's shards
    grads *= min(1, max_grad_norm / norm)
    params, opt_state = strategy.update(grads, opt_state, params)

The model state goes through a rank's micro-batches; then ranks agree on it, by one all-reduce for floats and one for
each other dtype:

| leaf           | ``"mean"``                 | ``"first"``, as DDP's ``broadcast_buffers`` |
|----------------|----------------------------|---------------------------------------------|
| floating       | sum over ranks of x_r, / N | x_0                                         |
| others: counts | x_0                        | x_0                                         |
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from ..communication.buckets import BucketPlan
from ..communication.collectives import all_gather
from ..communication.reduction import Means, divide as divide_total, order_token, sends_uncopied, sum_of_squares
from ..communication.traces import GradientTrace
from ..loss import PartialLoss, Parts, PerExample, denominator, divide, map_per_example
from ..scopes import LOSS_SCOPE, METRICS_SCOPE, MODEL_STATE_SCOPE, OPTIMIZER_SCOPE, OTHER_AXES_SCOPE
from ..strategy import Layout, Ranks, Strategy
from ..tree import merge, named_leaves, split
from .wide_products import with_wide_products


class TrainState(NamedTuple):
    """What a training run carries from step to step; which leaves are shards is said by ``Trainer.layout``."""

    step: jax.Array  # steps taken; int32, []
    params: Any  # the user's tree, in the compute dtype where there is one
    opt_state: Any  # the optimizer's state of the trained parameters; with a compute dtype their masters are in it
    key: jax.Array  # a typed PRNG key, []
    model_state: Any = ()  # what ``loss_fn`` returns besides the loss and takes again, equal on all ranks

    def __repr__(self) -> str:
        num, size = len(jax.tree.leaves(self.params)), sum(leaf.size for leaf in jax.tree.leaves(self.params))
        at = "" if isinstance(self.step, jax.core.Tracer | jax.ShapeDtypeStruct) else f"step {self.step}, "
        return f"TrainState({at}{num} parameters, {size:,} elements)"


class Run(NamedTuple):
    """What a step is made of; the options are those of ``Trainer``."""

    loss: PartialLoss  # of parameters as the layout holds them
    strategy: Strategy
    layout: Layout  # of the state
    num_microbatches: int = 1
    max_grad_norm: float | None = None
    state_sync: str = "mean"
    nonfinite: str = "ignore"


def local_gradients(
    run: Run, trainable: Any, frozen: Any, model_state: Any, batch: Any, key: Any
) -> tuple[dict[str, jax.Array], tuple[Parts, Any]]:
    """This rank's gradients by name, its metrics and its model state; of held shards, the sums over ranks."""
    with jax.named_scope(LOSS_SCOPE):
        compute = jax.grad(lambda ours: run.loss(merge(ours, frozen), model_state, batch, key), has_aux=True)
        grads, (parts, new_state) = compute(trainable)
    if parts.loss.weight is not None:  # statistics of no examples are often 0 / 0
        new_state = jax.tree.map(partial(jnp.where, parts.loss.weight == 0), model_state, new_state)
    by_name = {name: grad.astype(run.layout.grad_dtypes[name]) for name, grad in named_leaves(grads).items()}
    return by_name, (parts, new_state)


def train_step(
    run: Run, backward: GradientTrace, plan: BucketPlan, state: TrainState, batch: Any
) -> tuple[TrainState, dict[str, Any], Any]:
    """Gives this rank's next state, the metrics, and the weight of all examples or None; ``check_vma`` must be off."""
    ranks, strategy, layout = run.layout.ranks, run.strategy, run.layout
    # Dropout must differ between ranks and steps, and repeat with the seed.
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), lax.axis_index(ranks.axis))
    trainable, frozen = split(state.params, layout.trainable)
    has_microbatches = run.num_microbatches > 1
    # Stage 2 adds up shards of sums; the others add up full gradients and reduce once.
    reduces_each = plan.each_microbatch and has_microbatches
    # Gradients that are sent as they are written are not cast by a kernel of their own.
    is_wide = not (has_microbatches or ranks.other_axes or strategy.hook) and sends_uncopied(plan)

    def gradients(model_state: Any, microbatch: Any, index: Any) -> tuple[Any, Any]:
        params: Any = (trainable, frozen)
        token: Any = 0
        if layout.held and has_microbatches:  # or XLA would gather every unit once, before the loop, and hold all
            params, token = order_token(params, index)
        compute = partial(with_wide_products, backward.__call__) if is_wide else backward
        grads, (parts, model_state) = compute(*params, model_state, microbatch, jax.random.fold_in(key, index))
        if reduces_each:
            grads = strategy.reduce(grads, plan, layout, 1, index).grads
        return (grads, parts, token), model_state

    if has_microbatches:
        is_apart = reduces_each or bool(layout.held)
        found, model_state = over_microbatches(gradients, state.model_state, batch, run.num_microbatches, is_apart)
    else:
        found, model_state = gradients(state.model_state, batch, 0)
    grads, parts, token = found

    # Sums can be added, means cannot: gradients, loss and aux are divided once, after all have been summed.
    parts = sum_over_ranks(parts, ranks)
    num_parts = ranks.num_ranks * run.num_microbatches
    with jax.numpy_dtype_promotion("standard"):
        divisor = denominator(parts.loss, num_parts) + token
    if reduces_each:
        means = Means({name: divide_total(grad, divisor) for name, grad in grads.items()})
    else:
        means = strategy.reduce(grads, plan, layout, divisor)

    loss, aux = divide(parts, num_parts)
    metrics = {"loss": loss, "grad_norm": global_norm(means, layout)} | ({} if aux is None else {"aux": aux})
    with jax.named_scope(OPTIMIZER_SCOPE):  # by this name, instruments tell updates from the backward
        grads = means.grads
        if run.max_grad_norm is not None:
            grads = clip_to_norm(grads, metrics["grad_norm"], run.max_grad_norm)
        grads = {name: grad.astype(layout.dtypes[name]) for name, grad in grads.items()}
        trainable, opt_state = strategy.update(grads, state.opt_state, trainable, plan, layout, loss)
    if jax.tree.leaves(model_state):
        model_state = sync_model_state(model_state, ranks, run.state_sync)
    new = TrainState(state.step + 1, merge(trainable, frozen), opt_state, state.key, model_state)
    return new, metrics, parts.loss.weight


def auto_step(
    loss_fn: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """The baseline: a step to jit with a replicated state and a batch sharded by rank; XLA adds the reductions."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        with jax.named_scope(OPTIMIZER_SCOPE):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            updated = optax.apply_updates(state.params, updates)
            metrics = {"loss": loss, "grad_norm": jnp.sqrt(sum_of_squares(jax.tree.leaves(grads)))}
        return TrainState(state.step + 1, updated, opt_state, state.key), metrics

    return step


def over_microbatches(
    function: Callable[..., Any], carry: Any, batch: Any, num: int, is_apart: bool
) -> tuple[Any, Any]:
    """Sums ``function(carry, micro-batch, index) -> (summand, carry)`` over equal parts of a batch.

    The last one stands outside of the loop, so that its backward and the communication can overlap. Where each one
    communicates, it is kept apart: XLA inlines a loop of one round and would communicate only once.
    """

    def numbered(carry: Any, piece: Any, index: Any) -> tuple[Any, Any]:
        (grads, parts, token), carry = function(carry, piece, index)
        # A sum over micro-batches joins the values of examples.
        parts = map_per_example(lambda each: jnp.zeros((num, *each.shape), each.dtype).at[index].set(each), parts)
        return (grads, parts, token), carry

    # [n, ...] -> [num, n / num, ...]: micro-batches are consecutive examples.
    pieces = jax.tree.map(lambda leaf: leaf.reshape(num, leaf.shape[0] // num, *leaf.shape[1:]), batch)
    earlier, last = (jax.tree.map(lambda leaf, part=part: leaf[part], pieces) for part in (slice(-1), -1))
    # The scan starts from zeros of the shapes that one micro-batch gives.
    shapes, _ = jax.eval_shape(numbered, carry, last, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(sums: tuple[Any, Any], item: tuple[Any, jax.Array]) -> tuple[tuple[Any, Any], None]:
        total, carry = sums
        found, carry = numbered(carry, *item)
        return (jax.tree.map(jnp.add, total, found), carry), None

    (total, carry), _ = lax.scan(add, (zeros, carry), (earlier, jnp.arange(num - 1, dtype=jnp.int32)))
    if is_apart:
        total = lax.optimization_barrier(total)
    found, carry = numbered(carry, last, jnp.int32(num - 1))
    grads, parts, token = jax.tree.map(jnp.add, total, found)
    return (grads, map_per_example(lambda each: each.reshape(-1, *each.shape[2:]), parts), token), carry


@jax.named_scope(METRICS_SCOPE)
def global_norm(means: Means, layout: Layout) -> jax.Array:
    """The Euclidean norm of the mean gradients, over the shards of all ranks."""
    full, squares = jnp.zeros(()), means.squares
    if squares is None:
        squares = sum_of_squares(grad for name, grad in means.grads.items() if name in layout.cuts)
        full = sum_of_squares(grad for name, grad in means.grads.items() if name not in layout.cuts)
    if layout.cuts and layout.ranks.num_shards > 1:  # each rank has squared its own shards
        squares = lax.psum(squares, layout.ranks.shard_axis)
    return jnp.sqrt(squares + full)


def clip_to_norm(grads: dict[str, jax.Array], norm: jax.Array, max_norm: float) -> dict[str, jax.Array]:
    """Scales gradients of a norm down to another one, by optax's formula; torch's adds 1e-6 to the norm."""
    scale = jnp.minimum(1.0, max_norm / norm)
    return {name: grad * scale.astype(grad.dtype) for name, grad in grads.items()}


def sum_over_ranks(parts: Any, ranks: Ranks, scope: str = METRICS_SCOPE) -> Any:
    """Sums metrics over ranks, in one all-reduce and one for each integer dtype, and joins values of examples."""
    if ranks.num_ranks == 1:
        return parts
    leaves, structure = jax.tree.flatten(parts, is_leaf=lambda leaf: isinstance(leaf, PerExample))
    # Floats of all dtypes share a call; integers keep theirs, since a float sum would round them.
    places: dict[Any, list[int]] = {}
    with jax.named_scope(scope):
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, PerExample):
                leaves[place] = PerExample(all_gather(leaf.values, ranks.axis, equal=True))
            else:
                kind = leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.integer) else "float"
                places.setdefault(kind, []).append(place)
        for alike in places.values():
            flat, unravel = ravel_pytree([leaves[place] for place in alike])
            for place, total in zip(alike, unravel(lax.psum(flat, ranks.axis)), strict=True):
                leaves[place] = total
    return jax.tree.unflatten(structure, leaves)


def sync_model_state(model_state: Any, ranks: Ranks, how: str) -> Any:
    """Makes the ranks' model states one; ``how`` is ``"mean"`` or ``"first"``."""

    def is_mean(leaf: jax.Array) -> bool:
        return how == "mean" and jnp.issubdtype(leaf.dtype, jnp.floating)

    def summand(leaf: jax.Array) -> jax.Array:
        if ranks.other_axes:
            with jax.named_scope(OTHER_AXES_SCOPE):  # or XLA sums the blocks into which the loss has split a leaf
                leaf = lax.with_sharding_constraint(leaf, PartitionSpec())
        numbers = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:  # of 16 bits, sums could overflow
            numbers = leaf.astype(jnp.float32)
        # Not times 0: the other ranks' may be NaN.
        is_sent = is_mean(leaf) | (lax.axis_index(ranks.axis) == 0)
        return jnp.where(is_sent, numbers, jnp.zeros_like(numbers))

    def result(leaf: jax.Array, total: jax.Array) -> jax.Array:
        return (total / ranks.num_ranks if is_mean(leaf) else total).astype(leaf.dtype)

    totals = sum_over_ranks(jax.tree.map(summand, model_state), ranks, MODEL_STATE_SCOPE)
    return jax.tree.map(result, model_state, totals)


def guarded_step(
    step: Callable[..., Any], nonfinite: str, state: TrainState, batch: Any
) -> tuple[TrainState, dict[str, Any]]:
    """A step that keeps the state, bit for bit but for its number, where the whole batch has no weight.

    Weight decay and momentum would move parameters. With ``"skip"`` also where a number is not finite, on all ranks.
    """
    new, metrics, weight = step(state, batch)
    conditions = [] if weight is None else [weight != 0]
    if nonfinite == "skip":
        with jax.named_scope(METRICS_SCOPE):
            is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            # Of the model state a leaf that was finite: a running minimum may start at infinity.
            lost = jax.tree.map(
                lambda new, old: (jnp.isfinite(old) & ~jnp.isfinite(new)).any(), new.model_state, state.model_state
            )
            is_finite &= ~jax.tree.reduce(jnp.logical_or, lost, jnp.bool_(False))
        metrics |= {"skipped": 1 - is_finite.astype(jnp.int32)}
        conditions.append(is_finite)
    if conditions:
        is_taken = jnp.stack(conditions).all()
        kept = state._replace(step=new.step)
        new = jax.tree.map(lambda new, old: new if new is old else jnp.where(is_taken, new, old), new, kept)
    return new, metrics


def evaluate(run: Run, state: TrainState, batch: Any) -> Any:
    """Gives the global mean loss of a batch and the aux values, if there are any, equal on every rank."""
    _, (parts, _) = run.loss(state.params, state.model_state, batch, None)
    loss, aux = divide(sum_over_ranks(parts, run.layout.ranks), run.layout.ranks.num_ranks)
    return loss if parts.aux is None else (loss, aux)


def measure(run: Run, function: Callable[..., Any], state: TrainState, inputs: tuple[Any, jax.Array]) -> Any:
    """Gives what ``loss.measured`` does of the examples of all ranks, and which of them count, equal on every rank."""
    found = function(state.params, state.model_state, inputs)
    parts, is_real = sum_over_ranks((found, PerExample(inputs[1])), run.layout.ranks)
    return parts, is_real.values
