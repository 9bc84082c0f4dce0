"""A training at each ZeRO stage: the bytes that a device holds and sends, planned and, if asked, compiled.

No formula knows the work of any model, but shapes, optimizer and strategy fix what lives across steps and what is sent:

    stage  strategy  parameters  gradients  optimizer state
    0      bucketed  full        full       full
    1      zero1     full        full       shard
    2      zero2     full        shard      shard
    3      zero3     shard       shard      shard

Where the optimizer is not element-wise, stages 1 and 2 are those with ``shard="leaves"``. A compiled step must hold
state to the byte, and issue the planned collectives; its peak is only compared with the device's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..network import GB, Network
from ..registry import make_strategy
from ..training.step import TrainState
from ..training.train import Trainer
from ..training.validation import check_batch
from ..tree import split
from . import targets
from .inspect import Training, name_of
from .memory import DeviceBytes, held_bytes, step_memory
from .schedule import Collective, read_schedule
from .targets import TargetMemoryError, TargetProgram

STRATEGY_NAMES = ("bucketed", "zero1", "zero2", "zero3")  # by ZeRO stage
MARK = "NOT AS PLANNED"
_STATE = ("parameters", "optimizer_state")
# On TPUs, a fusion around an all-reduce in which each rank computes only its part of the result.
_SCATTERING_KERNEL = "AllReduceScatter"


class Row(NamedTuple):
    """One quantity of a device, in bytes; None where there is no number.

    Attributes:
        check: The verdict in words.
        holds: Whether the program is as planned; None for what is no plan.
    """

    label: str
    planned: int | None
    compiled: int | None
    check: str
    holds: bool | None = None


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
    loss_fn, optimizer, params, batch, options, model_state = training = training.shapes()
    mesh = targets.mesh(target.spec)
    found: dict[int, StagePlan] = {}
    pending = {}
    for stage in stages:
        name = STRATEGY_NAMES[stage]
        for by_leaves in ({}, {"shard": "leaves"}) if stage in (1, 2) else ({},):
            try:
                trainer = Trainer(loss_fn, optimizer, make_strategy(name, **by_leaves), mesh, **options)
                state = trainer.abstract_state(params, model_state)
                found[stage] = _plan_stage(stage, trainer, state, training)
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
            found[stage] = compare(found[stage], compilation.result(), state, target)
        except TargetMemoryError as refusal:
            rows = [Row(name.replace("_", " "), getattr(found[stage], name), None, "not compiled") for name in _STATE]
            peak = _peak_row(refusal.needed_bytes, refusal.available_bytes)
            found[stage] = replace(found[stage], rows=(*rows, peak))
    return list(found.values())


def _plan_stage(stage: int, trainer: Trainer, state: TrainState, training: Training) -> StagePlan:
    batch = training.batch
    check_batch(batch, trainer.num_ranks, trainer.num_microbatches)
    held, collectives = held_bytes(trainer.layout(state)), trainer.planned(state, batch)
    ring, ranks = Network(1.0), range(trainer.num_ranks)
    return StagePlan(
        stage, name_of(trainer.strategy), held.parameters, _gradient_bytes(stage, trainer, training, held),
        held.optimizer_state, tuple(collectives), sum(ring.transfer_s(*each, ranks) * GB for each in collectives),
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


def compare(plan: StagePlan, program: TargetProgram, state: TrainState, target: targets.Target) -> StagePlan:
    """Compares a stage's plan with its compiled step."""
    schedule, held = read_schedule(program), step_memory(program, state)
    found = schedule.collectives()
    rows = [
        *(_state_row(name, getattr(plan, name), getattr(held, name)) for name in _STATE),
        *_collective_rows(" buffers", plan.collectives, [each for each in found if each.is_gradients]),
        *_collective_rows(", model state", plan.synced, [each for each in found if each.is_model_state]),
    ]
    for row in _collective_rows(", loss", plan.called, [each for each in found if each.is_loss]):
        # XLA may merge or rewrite what a loss function calls, which is no plan.
        rows.append(row if row.holds else row._replace(check=row.check.replace(MARK, "not as traced"), holds=None))
    rows.append(_peak_row(program.memory_analysis().peak_memory_in_bytes, target.chip.memory_bytes))
    return replace(plan, rows=tuple(rows), notes=schedule.notes)


def _state_row(name: str, planned: int, compiled: int) -> Row:
    apart = compiled - planned
    check = f"{MARK}: {apart:+,} bytes" if apart else "ok"
    return Row(name.replace("_", " "), planned, compiled, check, holds=not apart)


def _peak_row(needed: int, available: int) -> Row:
    fits = "fits" if needed < available else "does not fit"
    return Row("peak", None, needed, f"{fits} in {available / GB:.2f} GB")


def _collective_rows(what: str, planned: Sequence[tuple[str, int]], found: Sequence[Collective]) -> list[Row]:
    """Compares the full buffers of each kind, each by its size."""
    compiled, rows = [(_kind(each), each.num_bytes) for each in found], []
    for kind in sorted({kind for kind, _ in (*planned, *compiled)}):
        ours, theirs = (sorted(num_bytes for one, num_bytes in some if one == kind) for some in (planned, compiled))
        said = f"ok: {len(ours):,}" if ours == theirs else f"{MARK}: {len(ours):,} planned, {len(theirs):,} compiled"
        rows.append(Row(f"{kind}{what}", sum(ours), sum(theirs), said, ours == theirs))
    return rows


def _kind(collective: Collective) -> str:
    return "reduce-scatter" if _SCATTERING_KERNEL in collective.kernel else collective.kind
