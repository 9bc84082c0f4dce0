"""What a device holds and sends in a training of one's own, by ZeRO stage; on request beside the compiled steps.

No formula knows the work of any model. Shapes, optimizer and strategy fix what lives across steps, and what is sent:

    stage  strategy  parameters  gradients  optimizer state
    0      bucketed  full        full       full
    1      zero1     full        full       shard
    2      zero2     full        shard      shard
    3      zero3     shard       shard      shard

Where the optimizer is not element-wise, stages 1 and 2 are those with ``shard="leaves"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..network import GB
from ..registry import make_strategy
from ..training.step import TrainState
from ..training.train import Trainer
from ..training.validation import check_batch
from . import targets
from .inspect import Training, bytes_of_gradients, name_of
from .memory import held_bytes, step_memory
from .schedule import Collective, read_schedule
from .targets import TargetMemoryError, TargetProgram
from .verify import MARK, STRATEGY_NAMES, Row, kind_of, sent_by_rank, state_row


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
                gradients = bytes_of_gradients(params, trainer, **options)
                found[stage] = _planned(stage, trainer, state, batch, gradients)
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
            found[stage] = replace(found[stage], rows=_refused(found[stage], refusal))
    return list(found.values())


def _planned(stage: int, trainer: Trainer, state: TrainState, batch: Any, gradients: int) -> StagePlan:
    check_batch(batch, trainer.num_ranks, trainer.num_microbatches)
    held, collectives = held_bytes(trainer.layout(state)), trainer.planned(state, batch)
    return StagePlan(
        stage, name_of(trainer.strategy), held.parameters, gradients, held.optimizer_state,
        tuple(collectives), sum(sent_by_rank(*each, range(trainer.num_ranks)) for each in collectives),
        tuple(trainer.planned_sync(state)), tuple(trainer.planned_loss(state, batch)),
    )  # fmt: skip


def _compared(plan: StagePlan, program: TargetProgram, state: TrainState, target: targets.Target) -> StagePlan:
    schedule, held = read_schedule(program), step_memory(program, state).after_init
    found = schedule.collectives()
    rows = [
        state_row("parameters", plan.parameters, held.parameters, {}),
        state_row("optimizer state", plan.optimizer_state, held.optimizer_state, {}),
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


def _peak_row(peak: int, available: int) -> Row:
    return Row("peak", None, peak, f"{'fits' if peak < available else 'does not fit'} in {available / GB:.2f} GB")


def _refused(plan: StagePlan, refusal: TargetMemoryError) -> tuple[Row, ...]:
    held = (("parameters", plan.parameters), ("optimizer state", plan.optimizer_state))
    return (
        *(Row(label, num_bytes, None, "not compiled") for label, num_bytes in held),
        _peak_row(refusal.needed_bytes, refusal.available_bytes),
    )
