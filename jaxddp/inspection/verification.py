"""A plan's formulas beside the step that the compiler makes of it: bytes on each device, and bytes that each sends.

What lives across steps must agree to the byte: a formula divides by the number of ranks, and where leaves are padded or
stay whole the difference is known beforehand. So must traffic, of which the program tells every collective, those of
a loop as often as it goes round. What comes and goes within a step, and with it the peak, is an estimate: it is laid
beside what the compiler needs, and only whether both fit must be the same.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..compiled.memory import step_memory
from ..compiled.operations import Collective
from ..compiled.schedule import read_schedule
from ..models import TransformerConfig
from ..planning.cost.memory import state_bytes
from ..planning.cost.traffic import Traffic, sent_bytes
from ..planning.network import GB, Network
from ..planning.plan import Plan, plan, units
from ..targets.program import TargetMemoryError, TargetProgram
from .plan_step import PlannedStep, start_planned_step

_ONE_GB_PER_S = Network(1.0)
# Of a TPU: a fusion around an all-reduce, of whose result each rank makes its part only.
_SCATTERING_KERNEL = "AllReduceScatter"
_MARK = "NOT AS PLANNED"
_ROUNDING_BYTES = 0.5  # of formulas, which divide
_UNEVEN = "padding, and small leaves that stay whole"
_OWN_DTYPE = "what stays whole is gathered in its own dtype"
_KEPT = f"{_UNEVEN}, units that are gathered once"


class Row(NamedTuple):
    """One quantity of a device, in bytes.

    Attributes:
        label: What it is.
        planned: By formula; None if there is none.
        compiled: In the program; None if there is no program.
        check: What follows, in words.
        holds: Whether the formula does; None of an estimate, or where one of the two is missing.
    """

    label: str
    planned: float | None
    compiled: float | None
    check: str
    holds: bool | None = None

    @property
    def difference(self) -> float | None:
        """Compiled less planned."""
        return None if self.planned is None or self.compiled is None else self.compiled - self.planned


@dataclass(frozen=True)
class Verification:
    """A plan beside its compiled step.

    Attributes:
        plan: Of the tokens that were compiled.
        rows: What was compared.
        collectives: ``(kind, bytes, ranks)`` of each collective of the program but its metrics' -> how many there are.
        refusal: What the compiler said if the step does not fit.
        notes: What a reader should know beside the numbers.
    """

    plan: Plan
    rows: tuple[Row, ...]
    collectives: Counter[tuple[str, int, int]]
    refusal: TargetMemoryError | None = None
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every formula that is checked does."""
        return all(row.holds is not False for row in self.rows)


def verify(planned: Plan, dtype: str, config: TransformerConfig | None = None) -> Verification:
    """Compiles a plan's step for its target, and compares.

    Args:
        planned: The plan; its tokens are rounded up to as many on each data rank and in each micro-batch.
        dtype: In which it computes, and in which what it sends travels.
        config: Of the transformer that is planned; None if it is the feed-forward model.

    Returns:
        Formula and program.

    Raises:
        ValueError: If the step cannot be built or compiled, for another reason than memory.
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
    return replace(found, notes=(f"compiled with {tokens:,} tokens, as many on each data rank", *found.notes))


def compare(planned: Plan, step: PlannedStep, program: TargetProgram) -> Verification:
    """Compares a plan with a compiled step.

    Args:
        planned: The plan.
        step: That it means.
        program: That this was compiled to.

    Returns:
        Formula and program.
    """
    schedule, job = read_schedule(program), planned.job
    sent: dict[str, list[Collective]] = {"data": [], "tp": [], "": []}
    for each in schedule.collectives():
        if not each.is_metrics:
            sent[_axis(each.group, job.fsdp, job.tp)].append(each)
    notes = list(schedule.notes)
    kinds = Counter(map(_kind, sent["data"]))
    if job.stage and (more := kinds["all-reduce"] - Counter(kind for kind, _ in step.collectives or ())["all-reduce"]):
        notes.append(f"XLA makes all-reduces, which send twice as much, of {more:,} gathers and reduce-scatters")
    return Verification(
        planned,
        (*_memory_rows(planned, step, program), *_traffic_rows(planned, step, sent)),
        Counter((_kind(each), each.num_bytes, len(each.group)) for each in itertools.chain(*sent.values())),
        notes=tuple(notes),
    )


def _memory_rows(planned: Plan, step: PlannedStep, program: TargetProgram) -> list[Row]:
    held, memory = step_memory(program, step.state).after_init, program.memory_analysis()
    found, job = planned.bytes_per_device, planned.job
    even = state_bytes(job.workload.num_params / job.tp, job.stage, job.fsdp, job.per_parameter)
    rows = []
    for name, compiled, counters in (
        ("parameters", held.parameters, 0),
        ("optimizer_state", held.optimizer_state, step.counter_bytes),
    ):
        why = {_UNEVEN: getattr(step.exact, name) - getattr(even, name), "a count of steps": counters}
        rows.append(_state_row(name.replace("_", " "), found[name], compiled, why))
    others = memory.argument_size_in_bytes - held.parameters - held.optimizer_state
    tiles = f", {held.padding:,} of it to fill tiles" if held.padding > 0 else ""
    beside = planned.total_bytes - found["parameters"] - found["optimizer_state"]
    # The most at a time, which is what XLA compares with a TPU's memory; its temporaries laid end to end are more.
    peak = memory.peak_memory_in_bytes
    needed = peak - memory.argument_size_in_bytes
    return [
        *rows,
        Row("batch, step and key", None, others, f"not in the plan{tiles}"),
        Row("within the step", beside, needed, f"{needed / beside:.3f} times" if beside else ""),
        _peak_row(planned, peak, peak < job.cluster.memory_bytes, job.cluster.memory_bytes),
    ]


def _state_row(label: str, planned: float, compiled: float, why: dict[str, float]) -> Row:
    """Compares to the byte what lives across steps; ``why`` says what is beyond the formula, and how much it is."""
    if abs(wrong := compiled - planned - sum(why.values())) > _ROUNDING_BYTES:
        return Row(label, planned, compiled, f"{_MARK}: {wrong:+,.0f} bytes unaccounted for", holds=False)
    reasons = "; ".join(f"{num_bytes:+,.0f}, {reason}" for reason, num_bytes in why.items() if num_bytes)
    return Row(label, planned, compiled, f"ok: {reasons}" if reasons else "ok", holds=True)


def _peak_row(planned: Plan, needed: float, fits: bool, available: float) -> Row:
    says = {True: "fits", False: "does not fit"}
    agree = planned.fits == fits
    verdict = f"ok: {says[fits]}" if agree else f"{_MARK}: by formula it {says[planned.fits]}, compiled it {says[fits]}"
    return Row("peak", planned.total_bytes, needed, f"{verdict} in {available / GB:.2f} GB", holds=agree)


def _refused(planned: Plan, refusal: TargetMemoryError) -> Verification:
    peak = _peak_row(planned, refusal.needed_bytes, False, refusal.available_bytes)
    names = ("parameters", "optimizer_state")
    rows = [Row(name.replace("_", " "), planned.bytes_per_device[name], None, "not compiled") for name in names]
    return Verification(planned, (*rows, peak), Counter(), refusal)


def _traffic_rows(planned: Plan, step: PlannedStep, sent: dict[str, list[Collective]]) -> list[Row]:
    job, element_bytes = planned.job, planned.job.assumptions.element_bytes
    legs = units(("bucketed", "zero1", "zero2", "zero3")[job.stage], planned.num_microbatches)

    def leg(part: Traffic) -> float:
        num_params = job.workload.num_params / job.tp
        return float(sent_bytes(part, num_params, job.num_data_ranks, element_bytes, element_bytes))

    def own(*, gathers: bool) -> float | None:
        if step.collectives is None:
            return None
        kinds = [(kind, num_bytes) for kind, num_bytes in step.collectives if (kind == "all-gather") == gathers]
        return sum(_sent_bytes(kind, num_bytes, range(job.num_data_ranks)) for kind, num_bytes in kinds)

    own_gathers, why, is_sound = own(gathers=True), _KEPT, True
    if job.stage in (1, 2):
        param_bytes = job.per_parameter.parameter
        chunks = step.exact.optimizer_state / job.per_parameter.optimizer  # elements that a rank updates
        own_gathers, is_sound = (job.fsdp - 1) * param_bytes * chunks, param_bytes == element_bytes
        why = _UNEVEN if is_sound else _OWN_DTYPE
    # Forward and backward sum as many elements of each token, in an all-reduce each.
    summed_bytes = 2 * element_bytes * job.workload.summed_per_token * planned.tokens / job.num_data_ranks
    gathers = [each for each in sent["data"] if each.kind == "all-gather"]
    sums = [each for each in sent["data"] if each.kind != "all-gather"]
    gathered, summed = leg(legs._replace(gradients=0)), leg(legs._replace(parameters=0))
    rows = [
        _traffic_row("parameters gathered", gathered, gathers, own_gathers, why, is_sound=is_sound),
        _traffic_row("gradients summed", summed, sums, own(gathers=False), _UNEVEN),
        _traffic_row("products summed over tp", _sent_bytes("all-reduce", summed_bytes, range(job.tp)), sent["tp"]),
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
    own: float | None = None,
    why: str = "",
    *,
    is_sound: bool = True,
) -> Row:
    """Compares what a device sends.

    ``own`` is what the library plans to send, ``why`` the reason if that differs from the formula, and ``is_sound``
    whether the formula may leave this reason out.
    """
    compiled = sum(_sent_bytes(_kind(each), each.num_bytes, each.group) for each in found)
    said = " + ".join(f"{count:,} {kind}" for kind, count in Counter(map(_kind, found)).items()) or "none"
    holds = abs(compiled - planned) < _ROUNDING_BYTES
    if not holds and planned:
        said = f"{compiled / planned:.3f} times, {said}"
    if not holds and own is not None and abs(compiled - own) < _ROUNDING_BYTES:
        said, holds = f"{said}: {why}", is_sound
    return Row(label, planned, compiled, f"{'ok' if holds else _MARK}: {said}", holds)


def _sent_bytes(kind: str, num_bytes: float, group: Sequence[int]) -> float:
    """What each device of a group sends, on a ring."""
    return _ONE_GB_PER_S.transfer_s(kind, num_bytes, group) * GB


def _kind(collective: Collective) -> str:
    return "reduce-scatter" if _SCATTERING_KERNEL in collective.kernel else collective.kind


def _axis(group: Sequence[int], fsdp: int, tp: int) -> str:
    """Which ranks a group of devices are: ``"tp"`` neighbours, ``"data"`` ranks across them, or neither."""
    if tuple(group) == tuple(range(group[0], group[0] + tp)):
        return "tp"
    return "data" if tuple(group) == tuple(range(group[0], group[0] + fsdp * tp, tp)) else ""
