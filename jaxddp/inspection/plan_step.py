"""The training step that a plan means, described by shapes alone, and compiled for the plan's target.

    plan     step
    -------  --------------------------------------------------------------------------------------------------------
    tp = 1   this package's own: ``Trainer`` with ``bucketed``, ``zero1``, ``zero2`` or ``zero3``, by the plan's stage
    tp > 1   ``grid_step.py``: the feed-forward model, its parameters in shards over a grid, partitioned by XLA

Parameters are float32, or bfloat16 where the plan has 2 bytes for them; the optimizer is AdamW with float32 moments,
and a float32 master where the plan has 12 bytes for its state. Products are made, parameters of stage 3 travel and
gradients are summed in the plan's dtype. The feed-forward model is one stack of blocks under a scan at stage 3, and
blocks one by one at the stages whose gradients travel in buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import targets
from ..compiled.memory import state_formula
from ..ddp.bucketed import bucketed
from ..models import TransformerConfig, abstract
from ..planning.cost.memory import StateBytes, state_bytes
from ..planning.plan import Plan
from ..strategy import Strategy
from ..targets.compile import check_installed
from ..targets.job import Pending
from ..training.step import TrainState
from ..training.train import Trainer
from ..zero import layer, zero1, zero2, zero3
from .grid_step import block, mean_square, start_grid_step

DTYPES = ("bfloat16", "float16", "float32")
_LEARNING_RATE = 1e-3


class PlannedStep(NamedTuple):
    """A step under compilation.

    Attributes:
        state: That it takes, of ``jax.ShapeDtypeStruct``.
        exact: Bytes of parameters, gradients and optimizer state on a device, with the padding of what is cut and with
            what no rank shares; without counters.
        collectives: ``(kind, bytes)`` that the library plans; None where XLA chooses them.
        pending: What gives the program.
    """

    state: TrainState
    exact: StateBytes
    collectives: list[tuple[str, int]] | None
    pending: Pending

    @property
    def counter_bytes(self) -> int:
        """Of the optimizer's scalars."""
        leaves = jax.tree.leaves(self.state.opt_state)
        return sum(leaf.dtype.itemsize for leaf in leaves if leaf.ndim == 0)


class MasterState(NamedTuple):
    """State of ``with_master``: float32 parameters, and the state of the optimizer that updates them."""

    master: Any
    inner: Any


def start_planned_step(plan: Plan, dtype: str, config: TransformerConfig | None = None) -> PlannedStep:
    """Starts to compile the step that a plan means.

    Args:
        plan: For a target, of a number of tokens that its data ranks can share.
        dtype: The plan's, one of ``DTYPES``.
        config: Of the transformer that is planned; None if it is the feed-forward model.

    Returns:
        The step.

    Raises:
        ValueError: If it cannot be built: the target's compiler is missing, there are replicas, or sizes cannot be
            divided.
    """
    job, target = plan.job, targets.target(plan.job.cluster.name)
    check_installed(target)
    if dtype not in DTYPES:
        raise ValueError(f"dtype (={dtype!r}) must be one of {', '.join(DTYPES)} to be compiled")
    if job.dp > 1:
        raise ValueError(
            f"fsdp x tp (={job.fsdp} x {job.tp}) must be the {target.num_devices} devices of {target.spec!r} to be "
            "compiled, without replicas"
        )
    optimizer = optax.adamw(_LEARNING_RATE)
    if job.per_parameter.optimizer > 2 * jnp.dtype(jnp.float32).itemsize:
        optimizer = with_master(optimizer)
    return (_on_ranks if job.tp == 1 else _on_grid)(plan, target, dtype, config, optimizer)


def with_master(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keeps float32 copies of narrower parameters and updates these; the parameters are their rounded values.

    Args:
        inner: The optimizer of the copies.

    Returns:
        An optimizer whose updates are float32, to be added before they are rounded, as ``optax.apply_updates`` does.
    """

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params: Any) -> MasterState:
        master = wide(params)
        return MasterState(master, inner.init(master))

    def update(grads: Any, state: MasterState, params: Any) -> tuple[Any, MasterState]:
        updates, inner_state = inner.update(wide(grads), state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        rounded = jax.tree.map(lambda new, old: new.astype(old.dtype), master, params)
        return jax.tree.map(jnp.subtract, wide(rounded), wide(params)), MasterState(master, inner_state)

    return optax.GradientTransformation(init, update)


def _on_ranks(
    plan: Plan,
    target: targets.Target,
    dtype: str,
    config: TransformerConfig | None,
    optimizer: optax.GradientTransformation,
) -> PlannedStep:
    job = plan.job
    strategy = _strategy(plan, dtype)
    if config is None:
        loss_fn, params = _feed_forward(plan, as_stack=strategy.shards_params)
        batch: Any = {"x": jax.ShapeDtypeStruct((plan.tokens, job.workload.tensors[0][1][0]), jnp.dtype(dtype))}
    else:
        loss_fn, params = abstract(config)
        tokens = jax.ShapeDtypeStruct((plan.tokens // job.sequence_length, job.sequence_length), jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
    params = _in_dtype(params, _param_dtype(plan))
    trainer = Trainer(
        loss_fn if strategy.shards_params else lambda params, batch: loss_fn(_cast(params, dtype), batch),
        optimizer, strategy, targets.mesh(target.spec), num_microbatches=plan.num_microbatches,
        grad_dtype=None if strategy.shards_params else jnp.dtype(dtype),
    )  # fmt: skip
    state = trainer.abstract_state(params)
    exact = state_formula(params, strategy, trainer.num_ranks, job.per_parameter)
    return PlannedStep(state, exact, trainer.planned(state, batch), targets.start_compile(trainer, state, batch))


def _on_grid(
    plan: Plan,
    target: targets.Target,
    dtype: str,
    config: TransformerConfig | None,
    optimizer: optax.GradientTransformation,
) -> PlannedStep:
    job = plan.job
    if config is not None:
        raise ValueError(f"tp (={job.tp}) must be 1 for a transformer to be compiled: only feed-forward blocks are cut")
    if job.stage != 3 and job.fsdp > 1:
        raise ValueError(f"stage (={job.stage}) must be 3 for matrices cut by tp (={job.tp}) to be compiled")
    if job.cluster.torus and not job.cluster.axes(job.fsdp, job.tp).is_exact:
        sides = "x".join(map(str, job.cluster.torus))
        raise ValueError(f"fsdp x tp (={job.fsdp} x {job.tp}) must be whole axes of {sides} each to be compiled")
    _, stack = _feed_forward(plan, as_stack=True)
    width = job.workload.tensors[0][1][0]
    steps = plan.num_microbatches
    batch = jax.ShapeDtypeStruct((steps, plan.tokens // steps, width), jnp.dtype(dtype))
    params = _in_dtype(stack, _param_dtype(plan))
    state, pending = start_grid_step(target, params, batch, optimizer, fsdp=job.fsdp, tp=job.tp)
    # Sizes that can be divided need no padding.
    exact = state_bytes(job.workload.num_params // job.tp, 3, job.fsdp, job.per_parameter)
    return PlannedStep(state, exact, None, pending)


def _strategy(plan: Plan, dtype: str) -> Strategy:
    if plan.job.stage == 3:
        return zero3(compute_dtype=dtype, gather_dtype=dtype, reduce_dtype=dtype)
    cap_mb = plan.buckets.cap_mb if plan.buckets else None
    return {0: bucketed, 1: zero1, 2: zero2}[plan.job.stage](cap_mb)


def _feed_forward(plan: Plan, *, as_stack: bool) -> tuple[Callable[..., jax.Array], Any]:
    """The loss function of the feed-forward model, and its parameters in float32: one stack, or a list of blocks."""
    workload = plan.job.workload
    num_blocks = len(workload.unit_tensors)
    one = workload.tensors[: workload.unit_tensors[0]]
    leading = (num_blocks,) if as_stack else ()
    params: Any = {
        name.rpartition(".")[2]: jax.ShapeDtypeStruct((*leading, *shape), jnp.float32) for name, shape in one
    }
    unit = layer(lambda weights, x: block(weights, x))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        if as_stack:
            x, _ = jax.lax.scan(lambda x, weights: (unit(weights, x), None), x, params)
        else:
            for weights in params:
                x = unit(weights, x)
        return mean_square(x)

    return loss_fn, params if as_stack else [params] * num_blocks


def _param_dtype(plan: Plan) -> Any:
    return jnp.float32 if plan.job.per_parameter.parameter == 4 else jnp.bfloat16


def _in_dtype(params: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


def _cast(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
