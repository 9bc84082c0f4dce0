"""Plans beside real compilations for GPUs and TPUs that are not here: the formulas hold to the byte."""

import functools
from collections import Counter
from dataclasses import replace

import pytest

from jaxddp import targets
from jaxddp.instruments import verify as plan_verification
from jaxddp.instruments.targets import TargetMemoryError
from jaxddp.instruments.verify import PlannedStep, compare, start_planned_step, verify
from jaxddp.planning.cost.memory import MIXED
from jaxddp.planning.cost.workload import feed_forward
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.plan import TrainingJob, plan

LAYERS = 3
WIDE = feed_forward(256, 1024, LAYERS)
ODD = feed_forward(133, 101, LAYERS)
COUNT_BYTES = 4  # optax's own, of steps


def job(spec, workload=WIDE, **options):
    return TrainingJob(workload, cluster_of(targets.target(spec), "bfloat16"), tokens=512, **options)


JOBS = {
    "shards": job("h100:8", fsdp=8),
    "grid": job("h100:8", fsdp=4, tp=2, accumulation_steps=2),
    "grid of TPUs": job("v5p:8", fsdp=4, tp=2),
    "padded, mixed": job("h100:8", ODD, fsdp=8, per_parameter=MIXED),
    "stage 1": job("h100:8", ODD, fsdp=8, stage=1),
    "stage 0, mixed": job("h100:8", ODD, fsdp=8, stage=0, per_parameter=MIXED),
    "stage 2, mixed": job("h100:8", ODD, fsdp=8, stage=2, per_parameter=MIXED),
    "grid, mixed": job("h100:8", fsdp=1, tp=8, stage=0, per_parameter=MIXED),
}
JOBS["all small"] = job("h100:8", feed_forward(16, 32, LAYERS), fsdp=8)
LONG = ("grid of TPUs", "stage 1", "stage 0, mixed", "grid, mixed")


def jobs(*names):
    """A parameter, the long ones behind the mark ``full``."""
    return [pytest.param(name, marks=pytest.mark.full if name in LONG else []) for name in names]


EVEN = jobs("shards", "grid", "grid of TPUs")


@pytest.fixture(scope="module")
def compiled():
    """Of a name: plan, step and program, compiled when the first test asks for it."""

    @functools.cache
    def of(name):
        planned = plan(JOBS[name])
        step = start_planned_step(planned, "bfloat16")
        return planned, step, step.pending.result()

    return of


@pytest.fixture(scope="module")
def verified(compiled):
    return functools.cache(lambda name: compare(*compiled(name)))


def rows_of(verification):
    return {row.label: row for row in verification.rows}


@pytest.mark.parametrize("name", EVEN)
def test_the_state_is_the_formulas_to_the_byte(verified, name):
    rows, ranks = rows_of(verified(name)), JOBS[name].fsdp * JOBS[name].tp
    assert rows["parameters"].compiled == rows["parameters"].planned == 4 * WIDE.num_params / ranks
    assert rows["optimizer state"].planned == 8 * WIDE.num_params / ranks
    assert rows["optimizer state"].difference == COUNT_BYTES
    assert (rows["parameters"].check, rows["optimizer state"].check) == ("ok", "ok: +4, a count of steps")
    assert verified(name).holds and verified(name).notes == ()


@pytest.mark.parametrize("name", EVEN)
def test_traffic_is_the_formulas_to_the_byte(verified, name):
    rows, one = rows_of(verified(name)), JOBS[name]
    steps, ring = one.accumulation_steps or 1, (one.fsdp - 1) / one.fsdp
    assert rows["parameters gathered"].compiled == 2 * steps * 2 * WIDE.num_params / one.tp * ring
    assert rows["gradients summed"].compiled == steps * 2 * WIDE.num_params / one.tp * ring
    for label in rows.keys() & {"parameters gathered", "gradients summed", "products summed over tp", "sent in all"}:
        assert rows[label].difference == pytest.approx(0, abs=0.5)  # rounding of the formula
    assert rows["sent in all"].check == "1.000 times"
    kinds = Counter()
    for (kind, _, ranks), count in verified(name).collectives.items():
        kinds[kind, ranks] += count
    units = LAYERS * steps
    # A unit's matrices together, or one by one.
    assert kinds.pop(("all-gather", one.fsdp)) in (2 * units, 4 * units)
    assert kinds.pop(("reduce-scatter", one.fsdp)) in (units, 2 * units)
    assert kinds == ({("all-reduce", 2): 2 * units} if one.tp > 1 else {})
    if one.tp > 1:
        assert rows["products summed over tp"].compiled == 2 * 2 * LAYERS * 256 * 512 / one.fsdp


@pytest.mark.sample
@pytest.mark.parametrize("name", jobs(*JOBS))
def test_what_fits_by_formula_fits_when_compiled(verified, name):
    rows = rows_of(verified(name))
    assert rows["peak"].holds and rows["peak"].check.startswith("ok: fits in ")
    assert rows["within the step"].holds is None and rows["within the step"].check.endswith(" times")
    inside = sum(rows[label].compiled for label in ("parameters", "optimizer state", "batch, step and key"))
    assert rows["peak"].compiled == inside + rows["within the step"].compiled


def test_padding_is_the_whole_difference(verified):
    """133 x 101 elements are 8 x 1679.125: each rank holds 1680 of each of 6 matrices."""
    rows = rows_of(verified("padded, mixed"))
    assert rows["parameters"].planned == 4 * ODD.num_params / 8  # masters, of which there are no copies
    assert rows["parameters"].compiled == 4 * 6 * 1680
    assert rows["optimizer state"].compiled == 8 * 6 * 1680 + COUNT_BYTES
    assert rows["optimizer state"].check.startswith("ok: +42, padding") and "; +4, " in rows["optimizer state"].check
    assert rows["gradients summed"].compiled == 2 * 6 * 1680 * 7
    assert rows["gradients summed"].check == "ok: 1.001 times, 3 reduce-scatter, as the step plans it"
    assert verified("padded, mixed").holds


def test_copies_of_2_bytes_are_whole_and_masters_shards(verified):
    rows = rows_of(verified("stage 2, mixed"))
    assert rows["parameters"].planned == rows["parameters"].compiled == 2 * ODD.num_params
    assert rows["optimizer state"].planned == 12 * ODD.num_params / 8
    assert rows["optimizer state"].compiled == 12 * 6 * 1680 + COUNT_BYTES
    assert rows["parameters gathered"].planned == 2 * ODD.num_params * 7 / 8
    assert rows["parameters gathered"].compiled == rows["gradients summed"].compiled == 2 * 6 * 1680 * 7
    assert verified("stage 2, mixed").holds


@pytest.mark.parametrize("name", ["parameters", "optimizer_state"])
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("case", ["grid", "padded, mixed"])
def test_a_formula_off_by_a_byte_is_marked(compiled, case, off, name):
    planned, step, program = compiled(case)
    wrong = replace(planned, bytes_per_device={**planned.bytes_per_device, name: planned.bytes_per_device[name] + off})
    found = compare(wrong, step, program)
    assert rows_of(found)[name.replace("_", " ")].check == f"NOT AS PLANNED: {-off:+} bytes unaccounted for"
    assert not found.holds


def test_leaves_too_small_to_be_sharded_are_judged_by_the_plan_of_the_step(compiled, verified):
    found = verified("all small")
    rows = rows_of(found)
    assert found.holds and rows["parameters gathered"].compiled == 0
    planned, step, program = compiled("all small")
    other = step._replace(collectives=[(kind, 2 * num_bytes) for kind, num_bytes in step.collectives])
    wrong = [row.label for row in compare(planned, other, program).rows if row.holds is False]
    assert wrong == ["gradients summed"]


def test_traffic_that_no_formula_has_is_marked(compiled):
    """A plan of half as many tokens, or of one micro-batch."""
    planned, step, program = compiled("grid")
    fewer = compare(replace(planned, tokens=256), step, program)
    assert rows_of(fewer)["products summed over tp"].check == "NOT AS PLANNED: 2.000 times, 12 all-reduce"
    once = compare(replace(planned, accumulation_steps=1), step, program)
    assert rows_of(once)["parameters gathered"].check == "NOT AS PLANNED: 2.000 times, 12 all-gather"
    other = compare(replace(planned, job=replace(planned.job, fsdp=2, tp=4)), step, program)
    assert rows_of(other)["other collectives"].check.startswith("NOT AS PLANNED: ")


class Refused:
    """What ``Pending`` is of a program that does not fit."""

    def result(self):
        raise TargetMemoryError("too much", "details", needed_bytes=100 * 10**9, available_bytes=10**9)


@pytest.mark.parametrize(
    ("memory_bytes", "check"),
    [
        (10**9, "NOT AS PLANNED: by formula it fits, compiled it does not fit in 1.00 GB"),
        (1.0, "ok: does not fit in 1.00 GB"),
    ],
)
def test_a_refusal_is_a_verdict_with_the_compilers_numbers(monkeypatch, memory_bytes, check):
    started = []

    def start(planned, dtype, config):
        started.append(planned)
        return PlannedStep(None, None, None, Refused())

    monkeypatch.setattr(plan_verification, "start_planned_step", start)
    tight = replace(JOBS["grid"], cluster=replace(JOBS["grid"].cluster, memory_bytes=memory_bytes), tokens=511)
    found = verify(plan(tight), "bfloat16")
    assert found.refusal.needed_bytes == rows_of(found)["peak"].compiled == 100 * 10**9
    assert (rows_of(found)["peak"].check, rows_of(found)["parameters"].check) == (check, "not compiled")
    assert [each.tokens for each in started] == [512] == [found.plan.tokens]
    assert found.notes == ("compiled with 512 tokens, the same number on each data rank",)
