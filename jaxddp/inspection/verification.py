"""A plan's formulas compared with the compiled step: bytes that each device holds, and bytes that each device sends.

State that lives across steps must match to the byte; differences from padding and replicated leaves are computed
exactly. Traffic must match too: the program lists every collective, those of a loop once per iteration. Temporary
memory and the peak are estimates: only whether both peaks fit must agree.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..compiled.memory import step_memory
from ..compiled.schedule import Collective, read_schedule
from ..models import TransformerConfig
from ..network import GB, Network
from ..planning.cost.memory import state_bytes
from ..planning.plan import Plan, plan, sent_bytes, strategy_traffic
from ..targets.program import TargetMemoryError, TargetProgram
from .planned_step import PlannedStep, start_planned_step

STRATEGY_NAMES = ("bucketed", "zero1", "zero2", "zero3")  # by ZeRO stage
MARK = "NOT AS PLANNED"
_ONE_GB_PER_S = Network(1.0)
# On TPUs, a fusion around an all-reduce in which each rank computes only its part of the result.
_SCATTERING_KERNEL = "AllReduceScatter"
_ROUNDING_BYTES = 0.5  # formulas divide
_UNEVEN = "padding, and small leaves that are not sharded"
_KEPT = f"{_UNEVEN}, units that are gathered once"
_ALL_SMALL = "all leaves are too small to be sharded, whole gradients are summed"
# Padding adds little, and a unit that is gathered once takes half of a gather away; more is a wrong formula.
_EXCUSED = (0.5, 1.1)


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
        found = _refused(whole, refusal)
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
    state = (("parameters", held.parameters, 0), ("optimizer_state", held.optimizer_state, step.counter_bytes))
    for name, compiled, counters in state:
        why = {_UNEVEN: getattr(step.exact, name) - getattr(even, name), "a count of steps": counters}
        rows.append(state_row(name.replace("_", " "), found[name], compiled, why))
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
        _peak_row(planned, peak, peak < job.cluster.memory_bytes, job.cluster.memory_bytes),
    ]


def state_row(label: str, planned: float, compiled: float, why: dict[str, float]) -> Row:
    """Compares state to the byte; ``why`` maps each reason for a difference from the formula to its bytes."""
    if abs(wrong := compiled - planned - sum(why.values())) > _ROUNDING_BYTES:
        return Row(label, planned, compiled, f"{MARK}: {wrong:+,.0f} bytes unaccounted for", holds=False)
    reasons = "; ".join(f"{num_bytes:+,.0f}, {reason}" for reason, num_bytes in why.items() if num_bytes)
    return Row(label, planned, compiled, f"ok: {reasons}" if reasons else "ok", holds=True)


def _peak_row(planned: Plan, needed: float, fits: bool, available: float) -> Row:
    says = {True: "fits", False: "does not fit"}
    agree = planned.fits == fits
    verdict = f"ok: {says[fits]}" if agree else f"{MARK}: by formula it {says[planned.fits]}, compiled it {says[fits]}"
    return Row("peak", planned.total_bytes, needed, f"{verdict} in {available / GB:.2f} GB", holds=agree)


def _refused(planned: Plan, refusal: TargetMemoryError) -> Verification:
    peak = _peak_row(planned, refusal.needed_bytes, False, refusal.available_bytes)
    names = ("parameters", "optimizer_state")
    rows = [Row(name.replace("_", " "), planned.bytes_per_device[name], None, "not compiled") for name in names]
    return Verification(planned, (*rows, peak), Counter(), refusal)


def _traffic_rows(planned: Plan, step: PlannedStep, sent: dict[str, list[Collective]]) -> list[Row]:
    job, element_bytes = planned.job, planned.job.assumptions.element_bytes
    name = STRATEGY_NAMES[job.stage]
    legs = strategy_traffic(name, planned.num_microbatches)

    def expected(*, gathers: bool) -> float | None:
        if step.collectives is None:
            return None
        kinds = [(kind, num_bytes) for kind, num_bytes in step.collectives if (kind == "all-gather") == gathers]
        return sum(sent_by_rank(kind, num_bytes, range(job.num_data_ranks)) for kind, num_bytes in kinds)

    # Forward and backward each all-reduce the same number of elements per token.
    summed_bytes = 2 * element_bytes * job.workload.summed_per_token * planned.tokens / job.num_data_ranks
    gathers = [each for each in sent["data"] if each.kind == "all-gather"]
    sums = [each for each in sent["data"] if each.kind != "all-gather"]
    gathered, summed = (sent_bytes(job, name, legs._replace(**{other: 0})) for other in ("gradients", "parameters"))
    planned_kinds = {kind for kind, _ in step.collectives or ()}
    kept = _KEPT if job.stage == 3 else _UNEVEN
    small = _ALL_SMALL if job.stage == 3 and planned_kinds == {"all-reduce"} else ""
    rows = [
        _traffic_row("parameters gathered", gathered, gathers, expected(gathers=True), small or kept, not small),
        _traffic_row("gradients summed", summed, sums, expected(gathers=False), small or _UNEVEN, not small),
        _traffic_row("products summed over tp", sent_by_rank("all-reduce", summed_bytes, range(job.tp)), sent["tp"]),
        _traffic_row("other collectives", 0.0, sent[""]),
    ]
    rows = [row for row in rows if row.planned or row.compiled]
    if not rows:
        return rows
    total, compiled = (sum(getattr(row, column) for row in rows) for column in ("planned", "compiled"))
    return [*rows, Row("sent in all", total, compiled, f"{compiled / total:.3f} times" if total else "")]


def _traffic_row(
    label: str,
    planned: float,
    found: Sequence[Collective],
    expected: float | None = None,
    why: str = "",
    is_formulas: bool = True,
) -> Row:
    """Compares sent bytes with the formula or, where ``why`` puts that a little off, with the plan of the step.

    The formula assumes that everything is sharded: without ``is_formulas`` the step's plan alone counts.
    """
    compiled = sum(sent_by_rank(kind_of(each), each.num_bytes, each.group) for each in found)
    said = " + ".join(f"{count:,} {kind}" for kind, count in Counter(map(kind_of, found)).items()) or "none"
    holds = abs(compiled - planned) < _ROUNDING_BYTES
    if not holds and planned:
        said = f"{compiled / planned:.3f} times, {said}"
    is_near = planned * _EXCUSED[0] <= compiled <= planned * _EXCUSED[1]
    is_as_planned = expected is not None and abs(compiled - expected) < _ROUNDING_BYTES
    if not holds and is_as_planned and (is_near or not is_formulas):
        said, holds = f"{said}: {why}", True
    return Row(label, planned, compiled, f"{'ok' if holds else MARK}: {said}", holds)


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
