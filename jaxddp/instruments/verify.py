"""Formulas beside compiled steps: bytes that each device holds, and bytes that each device sends.

``verify`` compiles the step that a plan describes, built from shapes alone:

    tp = 1   ``Trainer`` with ``bucketed``, ``zero1``, ``zero2`` or ``zero3``, by the plan's stage
    tp > 1   the feed-forward model sharded over a grid of FSDP x TP devices, as plain ``jit`` with shardings

State that lives across steps must match to the byte; differences from padding and replicated leaves are computed
exactly. Traffic must be the formula's, or where padding or small leaves put that off, the plan of the step; collectives
of a loop count once per iteration. Temporary memory and the peak are estimates: only whether both fit must agree.

Parameters are float32, or bfloat16 if the plan has 2 bytes for them. The optimizer is AdamW with float32 moments.
If the plan has 12 bytes of optimizer state, parameters are float32 masters, of which the loss takes copies of 2 bytes
below stage 3. Matrix products, parameter gathers of stage 3 and gradient reductions use the plan's dtype. At stage 3
the feed-forward model is a stack of blocks under a scan. Other stages reduce gradients in buckets: it is a list.

On the grid, arrays are annotated with the axes ``fsdp`` (X) and ``tp`` (Y), and XLA's partitioner adds the collectives:

    array                     sharding                     in use, one block at a time
    ------------------------  ---------------------------  ------------------------------------------
    gate, up    [L, D, F]     [L, D / X, F / Y]            gathered over fsdp in the plan's dtype: [D, F / Y]
    down        [L, F, D]     [L, F / Y, D / X]            likewise: [F / Y, D]
    batch       [K, B/K, D]   [K, B / (K X), D]            products with up are split over tp, those with down reduced

``plan_stages`` plans a training of one's own at every ZeRO stage. No formula knows the work of any model, but shapes,
optimizer and strategy fix what lives across steps, and what is sent:

    stage  strategy  parameters  gradients  optimizer state
    0      bucketed  full        full       full
    1      zero1     full        full       shard
    2      zero2     full        shard      shard
    3      zero3     shard       shard      shard

Where the optimizer is not element-wise, stages 1 and 2 are those with ``shard="leaves"``.

References:
    Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs, 2021.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..ddp.bucketed import bucketed
from ..models import TransformerConfig, abstract
from ..network import GB, Network
from ..planning.cost.memory import StateBytes, state_bytes
from ..planning.plan import Plan, plan, sent_bytes, strategy_traffic
from ..registry import make_strategy
from ..scopes import METRICS_SCOPE, OPTIMIZER_SCOPE
from ..strategy import Masters, Strategy
from ..training.step import TrainState
from ..training.train import Trainer
from ..training.validation import check_batch
from ..tree import split
from ..zero import layer, zero1, zero2, zero3
from . import targets
from .inspect import Training, name_of
from .memory import DeviceBytes, held_bytes, state_formula, step_memory
from .schedule import Collective, read_schedule
from .targets import Pending, TargetMemoryError, TargetProgram, check_installed, start_compile_for_target

DTYPES = ("bfloat16", "float16", "float32")
STRATEGY_NAMES = ("bucketed", "zero1", "zero2", "zero3")  # by ZeRO stage
MARK = "NOT AS PLANNED"
_LEARNING_RATE = 1e-3
_FSDP, _TP = "fsdp", "tp"
_SPECS = {
    "gate": PartitionSpec(None, _FSDP, _TP),
    "up": PartitionSpec(None, _FSDP, _TP),
    "down": PartitionSpec(None, _TP, _FSDP),
}
_KEPT = "jaxddp.kept"
_ONE_GB_PER_S = Network(1.0)
# On TPUs, a fusion around an all-reduce in which each rank computes only its part of the result.
_SCATTERING_KERNEL = "AllReduceScatter"
_ROUNDING_BYTES = 0.5  # formulas divide
_UNEVEN = "padding, and small leaves that are not sharded"
_STATE = ("parameters", "optimizer_state")


class Row(NamedTuple):
    """One quantity of a device, in bytes.

    Attributes:
        planned: By formula; None if there is none.
        compiled: In the program; None if there is none.
        check: The verdict in words.
        holds: Whether the formula holds; None for an estimate or a missing number.
    """

    label: str
    planned: float | None
    compiled: float | None
    check: str
    holds: bool | None = None

    @property
    def difference(self) -> float | None:
        """Compiled minus planned."""
        return None if self.planned is None or self.compiled is None else self.compiled - self.planned


@dataclass(frozen=True)
class Verification:
    """A plan and its compiled step.

    Attributes:
        plan: With the number of tokens that was compiled.
        collectives: Counts of the program's ``(kind, bytes, ranks)``, without metrics.
        refusal: The compiler's error if the step does not fit.
    """

    plan: Plan
    rows: tuple[Row, ...]
    collectives: Counter[tuple[str, int, int]]
    refusal: TargetMemoryError | None = None
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every checked formula holds."""
        return all(row.holds is not False for row in self.rows)


def verify(planned: Plan, dtype: str, config: TransformerConfig | None = None) -> Verification:
    """Compiles a plan's step for its target, and compares.

    Tokens are rounded up to the same number per data rank and micro-batch. ``dtype`` is that of compute and
    communication; ``config`` is None for the feed-forward model.

    Raises:
        ValueError: If the step cannot be built or compiled, except for lack of memory.
    """
    steps = planned.num_microbatches
    pieces = planned.job.least_tokens * steps
    tokens = math.ceil(planned.tokens / pieces) * pieces
    whole = plan(replace(planned.job, tokens=tokens, accumulation_steps=steps))
    step = start_planned_step(whole, dtype, config)
    try:
        found = compare(whole, step, step.pending.result())
    except TargetMemoryError as refusal:
        found = Verification(whole, _refused(whole.bytes_per_device, refusal, whole), Counter(), refusal)
    if tokens == planned.tokens:
        return found
    return replace(found, notes=(f"compiled with {tokens:,} tokens, the same number on each data rank", *found.notes))


def compare(planned: Plan, step: PlannedStep, program: TargetProgram) -> Verification:
    """Compares a plan with its compiled step."""
    schedule, job = read_schedule(program), planned.job
    sent: dict[str, list[Collective]] = {"data": [], "tp": [], "": []}
    for each in schedule.collectives():
        if each.is_gradients:
            sent[_axis(each.group, job.fsdp, job.tp)].append(each)
    notes = list(schedule.notes)
    kinds = Counter(map(kind_of, sent["data"]))
    if job.stage and (more := kinds["all-reduce"] - Counter(kind for kind, _ in step.collectives or ())["all-reduce"]):
        notes.append(f"XLA compiles {more:,} gathers and reduce-scatters to all-reduces, which send twice as much")
    return Verification(
        planned,
        (*_memory_rows(planned, step, program), *_traffic_rows(planned, step, sent)),
        Counter((kind_of(each), each.num_bytes, len(each.group)) for each in itertools.chain(*sent.values())),
        notes=tuple(notes),
    )


def _memory_rows(planned: Plan, step: PlannedStep, program: TargetProgram) -> list[Row]:
    held, memory = step_memory(program, step.state).after_init, program.memory_analysis()
    found, job = planned.bytes_per_device, planned.job
    even = state_bytes(job.workload.num_params / job.tp, job.stage, job.fsdp, job.held)
    rows = []
    for name, counters in zip(_STATE, (0, step.counter_bytes), strict=True):
        why = {_UNEVEN: getattr(step.exact, name) - getattr(even, name), "a count of steps": counters}
        rows.append(_state_row(name, found[name], getattr(held, name), why))
    others = memory.argument_size_in_bytes - held.parameters - held.optimizer_state
    tiles = f", {held.padding:,} of it to fill tiles" if held.padding > 0 else ""
    temporary = planned.total_bytes - found["parameters"] - found["optimizer_state"]
    # The peak is what XLA compares with a TPU's memory; the sum of all temporaries is larger.
    peak = memory.peak_memory_in_bytes
    needed = peak - memory.argument_size_in_bytes
    return [
        *rows,
        Row("batch, step and key", None, others, f"not in the plan{tiles}"),
        Row("within the step", temporary, needed, f"{needed / temporary:.3f} times" if temporary else ""),
        _peak_row(peak, job.cluster.memory_bytes, planned),
    ]


def _state_row(name: str, planned: float, compiled: float, why: dict[str, float]) -> Row:
    """Compares state to the byte; ``why`` maps each reason for a difference from the formula to its bytes."""
    label = name.replace("_", " ")
    if abs(wrong := compiled - planned - sum(why.values())) > _ROUNDING_BYTES:
        return Row(label, planned, compiled, f"{MARK}: {wrong:+,.0f} bytes unaccounted for", holds=False)
    reasons = "; ".join(f"{num_bytes:+,.0f}, {reason}" for reason, num_bytes in why.items() if num_bytes)
    return Row(label, planned, compiled, f"ok: {reasons}" if reasons else "ok", holds=True)


def _peak_row(needed: float, available: float, planned: Plan | None = None) -> Row:
    """Says whether the peak fits, and whether the plan says the same."""
    fits = needed < available
    says = {True: "fits", False: "does not fit"}
    if planned is None:
        return Row("peak", None, needed, f"{says[fits]} in {available / GB:.2f} GB")
    agree = planned.fits == fits
    verdict = f"ok: {says[fits]}" if agree else f"{MARK}: by formula it {says[planned.fits]}, compiled it {says[fits]}"
    return Row("peak", planned.total_bytes, needed, f"{verdict} in {available / GB:.2f} GB", holds=agree)


def _refused(state: dict[str, float], refusal: TargetMemoryError, planned: Plan | None = None) -> tuple[Row, ...]:
    rows = (Row(name.replace("_", " "), state[name], None, "not compiled") for name in _STATE)
    return *rows, _peak_row(refusal.needed_bytes, refusal.available_bytes, planned)


def _traffic_rows(planned: Plan, step: PlannedStep, sent: dict[str, list[Collective]]) -> list[Row]:
    job = planned.job
    name = STRATEGY_NAMES[job.stage]
    legs = strategy_traffic(name, planned.num_microbatches)

    def row(label: str, formula: float, found: Sequence[Collective], gathers: bool | None = None) -> Row:
        """Compares with the formula or, where leaves are not even, with what the step plans."""
        compiled = sum(sent_by_rank(kind_of(each), each.num_bytes, each.group) for each in found)
        said = " + ".join(f"{count:,} {kind}" for kind, count in Counter(map(kind_of, found)).items()) or "none"
        if holds := abs(compiled - formula) < _ROUNDING_BYTES:
            return Row(label, formula, compiled, f"ok: {said}", holds)
        if formula:
            said = f"{compiled / formula:.3f} times, {said}"
        if gathers is not None and step.collectives is not None:
            ours = [(kind, size) for kind, size in step.collectives if (kind == "all-gather") == gathers]
            own_plan = sum(sent_by_rank(kind, size, range(job.num_data_ranks)) for kind, size in ours)
            holds = abs(compiled - own_plan) < _ROUNDING_BYTES
        return Row(label, formula, compiled, f"ok: {said}, as the step plans it" if holds else f"{MARK}: {said}", holds)

    # Forward and backward each all-reduce the same number of elements per token.
    per_rank = planned.tokens / job.num_data_ranks
    summed_bytes = 2 * job.assumptions.element_bytes * job.workload.summed_per_token * per_rank
    gathers = [each for each in sent["data"] if each.kind == "all-gather"]
    sums = [each for each in sent["data"] if each.kind != "all-gather"]
    gathered, summed = (sent_bytes(job, name, legs._replace(**{other: 0})) for other in ("gradients", "parameters"))
    rows = [
        row("parameters gathered", gathered, gathers, gathers=True),
        row("gradients summed", summed, sums, gathers=False),
        row("products summed over tp", sent_by_rank("all-reduce", summed_bytes, range(job.tp)), sent["tp"]),
        row("other collectives", 0.0, sent[""]),
    ]
    rows = [row for row in rows if row.planned or row.compiled]
    total, compiled = (sum(getattr(row, column) for row in rows) for column in ("planned", "compiled"))
    every = [Row("sent in all", total, compiled, f"{compiled / total:.3f} times" if total else "")] if rows else []
    return rows + every


def sent_by_rank(kind: str, num_bytes: float, group: Sequence[int]) -> float:
    """What each device of a group sends, on a ring."""
    return _ONE_GB_PER_S.transfer_s(kind, num_bytes, group) * GB


def kind_of(collective: Collective) -> str:
    """The kind that a collective is planned as."""
    return "reduce-scatter" if _SCATTERING_KERNEL in collective.kernel else collective.kind


def _axis(group: Sequence[int], fsdp: int, tp: int) -> str:
    """The ranks of a group: ``"tp"`` neighbours, ``"data"`` ranks across them, or neither."""
    if tuple(group) == tuple(range(group[0], group[0] + tp)):
        return "tp"
    return "data" if tuple(group) == tuple(range(group[0], group[0] + fsdp * tp, tp)) else ""


class PlannedStep(NamedTuple):
    """A step being compiled.

    Attributes:
        state: Its state argument, of ``jax.ShapeDtypeStruct``.
        exact: Bytes per device of parameters, gradients and optimizer state, with padding and replicated leaves,
            without counters.
        collectives: Planned ``(kind, bytes)``; None where XLA chooses them.
        pending: The compilation.
    """

    state: TrainState
    exact: StateBytes
    collectives: list[tuple[str, int]] | None
    pending: Pending

    @property
    def counter_bytes(self) -> int:
        """Bytes of the optimizer's scalars."""
        leaves = jax.tree.leaves(self.state.opt_state)
        return sum(leaf.dtype.itemsize for leaf in leaves if leaf.ndim == 0)


def start_planned_step(plan: Plan, dtype: str, config: TransformerConfig | None = None) -> PlannedStep:
    """Starts to compile the step that a plan for a target describes.

    ``dtype`` is the plan's, one of ``DTYPES``; ``config`` is None for the feed-forward model.

    Raises:
        ValueError: If the target's compiler is missing, there are replicas, or sizes do not divide.
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
    return (_on_ranks if job.tp == 1 else _on_grid)(plan, dtype, config, optax.adamw(_LEARNING_RATE))


def _on_ranks(plan: Plan, dtype: str, config: TransformerConfig | None, optimizer: Any) -> PlannedStep:
    job, target = plan.job, targets.target(plan.job.cluster.name)
    strategy = _strategy(plan, dtype)
    if config is None:
        loss_fn, params = _feed_forward(plan, as_stack=strategy.gathers_in_loss)
        batch: Any = {"x": jax.ShapeDtypeStruct((plan.tokens, job.workload.tensors[0][1][0]), jnp.dtype(dtype))}
    else:
        loss_fn, params = abstract(config)
        tokens = jax.ShapeDtypeStruct((plan.tokens // job.sequence_length, job.sequence_length), jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
    params = _as_stored(params, plan)
    trainer = Trainer(
        loss_fn if strategy.gathers_in_loss else lambda params, batch: loss_fn(_cast(params, dtype), batch),
        optimizer, strategy, targets.mesh(target.spec), num_microbatches=plan.num_microbatches,
        grad_dtype=jnp.dtype(dtype),
        compute_dtype=dtype if strategy.gathers_in_loss else _copy_dtype(plan, dtype),
    )  # fmt: skip
    state = trainer.abstract_state(params)
    exact = state_formula(params, strategy, trainer.num_ranks, job.held)
    return PlannedStep(state, exact, trainer.planned(state, batch), targets.start_compile(trainer, state, batch))


def _on_grid(plan: Plan, dtype: str, config: TransformerConfig | None, optimizer: Any) -> PlannedStep:
    job, target = plan.job, targets.target(plan.job.cluster.name)
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
    params, copies = _as_stored(stack, plan), ()
    if job.stage < 3 and (copy_dtype := _copy_dtype(plan, dtype)):
        copies = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, copy_dtype), params)
    state, pending = start_grid_step(target, params, batch, optimizer, fsdp=job.fsdp, tp=job.tp, copies=copies)
    # The sizes divide evenly, so nothing is padded.
    exact = state_bytes(job.workload.num_params // job.tp, 3, job.fsdp, job.held)
    return PlannedStep(state, exact, None, pending)


def _strategy(plan: Plan, dtype: str) -> Strategy:
    if plan.job.stage == 3:
        return zero3()
    cap_mb = plan.buckets.cap_mb if plan.buckets else None
    return {0: bucketed, 1: zero1, 2: zero2}[plan.job.stage](cap_mb)


def _feed_forward(plan: Plan, *, as_stack: bool) -> tuple[Callable[..., jax.Array], Any]:
    """The feed-forward model's loss function and float32 parameters: one stack, or a list of blocks."""
    workload = plan.job.workload
    num_blocks, one = len(workload.unit_tensors), workload.tensors[: workload.unit_tensors[0]]
    leading = (num_blocks,) if as_stack else ()
    shapes = {name.rpartition(".")[2]: (*leading, *shape) for name, shape in one}
    params: Any = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    unit = layer(lambda weights, x: block(weights, x))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        if as_stack:
            x, _ = jax.lax.scan(lambda x, weights: (unit(weights, x), None), x, params)
        else:
            for weights in params:
                x = unit(weights, x)
        return _mean_square(x)

    return loss_fn, params if as_stack else [params] * num_blocks


def block(weights: Any, x: jax.Array, keep: Callable[[jax.Array], jax.Array] = lambda product: product) -> jax.Array:
    """One block of the feed-forward model: ``x up down``, or gated ``(silu(x gate) * x up) down``.

        x [tokens, D]    up [D, F]    gate [D, F]    down [F, D]    result [tokens, D]

    ``keep`` is applied to the results of the first products.
    """
    wide = {name: keep(x @ weight) for name, weight in weights.items() if name != "down"}
    return (jax.nn.silu(wide["gate"]) * wide["up"] if "gate" in wide else wide["up"]) @ weights["down"]


def _mean_square(y: jax.Array) -> jax.Array:
    with jax.named_scope(METRICS_SCOPE):
        return jnp.mean(jnp.square(y.astype(jnp.float32)))


def start_grid_step(
    target: targets.Target, params: dict[str, Any], batch: Any, optimizer: Any, *, fsdp: int, tp: int, copies: Any = ()
) -> tuple[TrainState, Pending]:
    """Starts to compile the feed-forward model's step on a grid.

        params   stacks ``up [L, D, F]``, ``down [L, F, D]`` and optionally ``gate [L, D, F]``, as stored
        copies   the same in the dtype that the loss takes, if params are masters of them
        batch    ``[K, B / K, D]``, in the dtype of products and gathers

    Returns:
        The program's state argument, without step and key, and the compilation.

    Raises:
        ValueError: If the sizes do not divide, or the target's compiler is missing.
    """
    _, width, hidden = params["up"].shape
    for name, size, ranks, count in (("width", width, "fsdp", fsdp), ("hidden", hidden, "tp", tp)):
        if size % count:
            raise ValueError(f"{name} (={size}) must be divisible by {ranks} (={count})")
    mesh = AbstractMesh(
        (fsdp, tp), (_FSDP, _TP), axis_types=(AxisType.Auto,) * 2,
        abstract_device=targets.mesh(target.spec).abstract_device,
    )  # fmt: skip
    empty: Any = ()
    opt_state = jax.eval_shape(optimizer.init, params)
    state = TrainState(empty, copies or params, Masters(params, opt_state) if copies else opt_state, empty)
    shardings = jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, _spec(path)), state)
    pending = start_compile_for_target(
        target, _grid_step(mesh, optimizer), (state, batch),
        in_shardings=(shardings, NamedSharding(mesh, PartitionSpec(None, _FSDP))),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=(0,),
    )  # fmt: skip
    return state, pending


def _spec(path: Any) -> PartitionSpec:
    """Shards a leaf like the parameter whose name ends its path; other leaves are replicated."""
    return _SPECS.get(getattr(path[-1], "key", ""), PartitionSpec())


def _grid_step(mesh: AbstractMesh, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def place(array: jax.Array, *axes: str | None) -> jax.Array:
        return lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*axes)))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def one(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            # Cast before the gather, so that the gather uses the narrow dtype.
            whole = {
                name: place(weight.astype(x.dtype), *(axis if axis == _TP else None for axis in _SPECS[name][1:]))
                for name, weight in weights.items()
            }
            y = block(whole, x, lambda product: checkpoint_name(place(product, _FSDP, _TP), _KEPT))
            return place(y, _FSDP, None), None

        policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
        return _mean_square(lax.scan(jax.checkpoint(one, policy=policy), x, params)[0])

    def grads_of(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return loss, {name: place(grad, *_SPECS[name]) for name, grad in grads.items()}

    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        weights = masters = state.params
        inner = state.opt_state
        if isinstance(state.opt_state, Masters):
            masters, inner = state.opt_state
        loss, grads = grads_of(weights, batch[0])
        if len(batch) > 1:

            def add(total: Any, x: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, grads_of(weights, x)), None

            (loss, grads), _ = lax.scan(add, (loss, grads), batch[1:])
        with jax.named_scope(OPTIMIZER_SCOPE):
            grads = {name: grad.astype(masters[name].dtype) for name, grad in grads.items()}
            updates, inner = optimizer.update(grads, inner, masters)
            masters = optax.apply_updates(masters, updates)
        if not isinstance(state.opt_state, Masters):
            return state._replace(params=masters, opt_state=inner), loss
        copies = {name: masters[name].astype(weight.dtype) for name, weight in weights.items()}
        return state._replace(params=copies, opt_state=Masters(masters, inner)), loss

    return step


def _as_stored(params: Any, plan: Plan) -> Any:
    dtype = jnp.float32 if plan.job.per_parameter.parameter == 4 or plan.job.has_masters else jnp.bfloat16
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


def _copy_dtype(plan: Plan, dtype: str) -> Any:
    """The dtype of copies of masters: the plan's if it has their bytes; None without masters."""
    if not plan.job.has_masters:
        return None
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize == plan.job.per_parameter.parameter else jnp.bfloat16)


def _cast(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@dataclass(frozen=True)
class StagePlan:
    """A training at one ZeRO stage; bytes are those of one device.

    Attributes:
        strategy: Its name, and its options are the defaults; with ``by leaves``, ``shard="leaves"``.
        gradients: Those that outlive their bucket; they live within a step.
        collectives: Planned ``(kind, bytes)`` of a step, of the full buffers.
        sent_bytes: What a device sends in them, on a ring.
        synced: The same of the model state.
        called: The same of the loss function's own.
        refused: Why there is no such training; empty if there is.
        rows: Planned beside compiled bytes; empty if nothing was compiled.
        notes: What could not be read in the program, in words.
    """

    stage: int
    strategy: str
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    collectives: tuple[tuple[str, int], ...] = ()
    sent_bytes: float = 0.0
    synced: tuple[tuple[str, int], ...] = ()
    called: tuple[tuple[str, int], ...] = ()
    refused: str = ""
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def holds(self) -> bool:
        """Whether the compiled step is as planned, or there is none."""
        return all(row.holds is not False for row in self.rows)


def plan_stages(
    training: Training, target: targets.Target, stages: Sequence[int] = range(4), *, compiled: bool = False
) -> list[StagePlan]:
    """Plans a training at ZeRO stages on a target, by its shapes, with the global batch of all devices.

    With ``compiled`` each step is compiled for the target, and compared.

    Raises:
        ValueError: If no stage takes this training, or a step cannot be compiled, except for lack of memory.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch @ params["w"]) ** 2)
        >>> training = Training(loss_fn, optax.adam(0.1), {"w": jnp.zeros((8, 2))}, jnp.zeros((4, 8)))
        >>> [plan.total for plan in plan_stages(training, targets.target("h100:2"))]  # a counter has 4 bytes
        [260, 196, 164, 260]
    """
    loss_fn, optimizer, params, batch, options, model_state = training.shapes()
    mesh = targets.mesh(target.spec)
    found: dict[int, StagePlan] = {}
    pending = {}
    for stage in stages:
        name = STRATEGY_NAMES[stage]
        for by_leaves in ({}, {"shard": "leaves"}) if stage in (1, 2) else ({},):
            try:
                trainer = Trainer(loss_fn, optimizer, make_strategy(name, **by_leaves), mesh, **options)
                state = trainer.abstract_state(params, model_state)
                found[stage] = _plan_stage(stage, trainer, state, training.shapes())
            except ValueError as error:
                found.setdefault(stage, StagePlan(stage, name, refused=str(error)))
            else:
                if compiled:
                    pending[stage] = state, targets.start_compile(trainer, state, batch)
                break
    if all(plan.refused for plan in found.values()):
        raise ValueError(next(iter(found.values())).refused)
    for stage, (state, compilation) in pending.items():
        try:
            found[stage] = _compared(found[stage], compilation.result(), state, target)
        except TargetMemoryError as refusal:
            found[stage] = replace(found[stage], rows=_refused(vars(found[stage]), refusal))
    return list(found.values())


def _plan_stage(stage: int, trainer: Trainer, state: TrainState, training: Training) -> StagePlan:
    batch = training.batch
    check_batch(batch, trainer.num_ranks, trainer.num_microbatches)
    held, collectives = held_bytes(trainer.layout(state)), trainer.planned(state, batch)
    return StagePlan(
        stage, name_of(trainer.strategy), held.parameters, _gradient_bytes(stage, trainer, training, held),
        held.optimizer_state, tuple(collectives),
        sum(sent_by_rank(*each, range(trainer.num_ranks)) for each in collectives),
        tuple(trainer.planned_sync(state)), tuple(trainer.planned_loss(state, batch)),
    )  # fmt: skip


def _gradient_bytes(stage: int, trainer: Trainer, training: Training, held: DeviceBytes) -> int:
    """Bytes of the gradients that outlive their bucket; at stage 3 those of a parameter are sharded as it is."""
    given = training.options.get("grad_dtype")
    leaves = jax.tree.leaves(split(training.params, training.options.get("trainable"))[0])
    ranks = trainer.num_ranks if stage == 2 else 1
    num_bytes = sum(-(-leaf.size // ranks) * jnp.dtype(given or leaf.dtype).itemsize for leaf in leaves)
    every = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(training.params))
    return math.ceil(num_bytes * (held.parameters / every if stage == 3 else 1))


def _compared(plan: StagePlan, program: TargetProgram, state: TrainState, target: targets.Target) -> StagePlan:
    schedule, held = read_schedule(program), step_memory(program, state).after_init
    found = schedule.collectives()
    rows = [
        *(_state_row(name, getattr(plan, name), getattr(held, name), {}) for name in _STATE),
        *_collective_rows(" buffers", plan.collectives, [each for each in found if each.is_gradients]),
        *_collective_rows(", model state", plan.synced, [each for each in found if each.is_model_state]),
        *map(_traced, _collective_rows(", loss", plan.called, [each for each in found if each.is_loss])),
        _peak_row(program.memory_analysis().peak_memory_in_bytes, target.chip.memory_bytes),
    ]
    return replace(plan, rows=tuple(rows), notes=schedule.notes)


def _collective_rows(what: str, planned: Sequence[tuple[str, int]], found: Sequence[Collective]) -> list[Row]:
    """Compares the full buffers of each kind, each by its size."""
    compiled, rows = [(kind_of(each), each.num_bytes) for each in found], []
    for kind in sorted({kind for kind, _ in (*planned, *compiled)}):
        ours, theirs = (sorted(num_bytes for one, num_bytes in some if one == kind) for some in (planned, compiled))
        said = f"ok: {len(ours):,}" if ours == theirs else f"{MARK}: {len(ours):,} planned, {len(theirs):,} compiled"
        rows.append(Row(f"{kind}{what}", sum(ours), sum(theirs), said, ours == theirs))
    return rows


def _traced(row: Row) -> Row:
    """XLA may merge or rewrite what a loss function calls, which is no plan."""
    return row if row.holds else row._replace(check=row.check.replace(MARK, "not as traced"), holds=None)
