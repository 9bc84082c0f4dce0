"""Plans beside real compilations for GPUs and TPUs that are not here: the formulas hold to the byte."""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxddp import targets
from jaxddp.instruments import verify as plan_verification
from jaxddp.instruments.targets import TargetMemoryError
from jaxddp.instruments.verify import (
    PlannedStep,
    _grid_step,
    _spec,
    block,
    compare,
    start_planned_step,
    verify,
)
from jaxddp.planning.cost.memory import MIXED
from jaxddp.planning.cost.workload import feed_forward
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.plan import TrainingJob, plan
from jaxddp.strategy import Masters
from jaxddp.training.step import TrainState

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
    """3 x 133 x 101 elements are 8 x 5037.375: each rank holds 5038 of each of 2 stacks."""
    rows = rows_of(verified("padded, mixed"))
    assert rows["parameters"].planned == 4 * ODD.num_params / 8  # masters, of which there are no copies
    assert rows["parameters"].compiled == 4 * 2 * 5038
    assert rows["optimizer state"].compiled == 8 * 2 * 5038 + COUNT_BYTES
    assert rows["optimizer state"].check.startswith("ok: +") and "; +4, " in rows["optimizer state"].check
    assert rows["gradients summed"].compiled == 2 * 2 * 5038 * 7
    assert rows["gradients summed"].check == "ok: 1.000 times, 1 reduce-scatter, as the step plans it"
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


H100 = cluster_of(targets.target("h100:8"), "bfloat16")
V5P = cluster_of(targets.target("v5p:64"), "bfloat16")
GRID = TrainingJob(feed_forward(64, 256, 2), H100, fsdp=4, tp=2, tokens=64)


@pytest.mark.parametrize(
    ("job", "dtype", "said"),
    [
        (replace(GRID, fsdp=2), "bfloat16",
         "fsdp x tp (=2 x 2) must be the 8 devices of 'h100:8' to be compiled, without replicas"),
        (replace(GRID, stage=1), "bfloat16", "stage (=1) must be 3 for matrices cut by tp (=2) to be compiled"),
        (TrainingJob(GRID.workload, V5P, fsdp=8, tp=8, tokens=64), "bfloat16",
         "fsdp x tp (=8 x 8) must be whole axes of 4x4x4 each to be compiled"),
        (replace(GRID, workload=feed_forward(62, 256)), "bfloat16", "width (=62) must be divisible by fsdp (=4)"),
        (replace(GRID, workload=feed_forward(64, 255)), "bfloat16", "hidden (=255) must be divisible by tp (=2)"),
        (GRID, "float8", "dtype (='float8') must be one of bfloat16, float16, float32 to be compiled"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(job, dtype, said):
    with pytest.raises(ValueError) as raised:
        start_planned_step(plan(job), dtype)
    assert str(raised.value) == said


LAYERS, WIDTH, HIDDEN, TOKENS = 3, 8, 12, 16


def shapes(num_matrices=2, width=WIDTH, hidden=HIDDEN):
    wide = jax.ShapeDtypeStruct((LAYERS, width, hidden), jnp.float32)
    names = ("up",) if num_matrices == 2 else ("gate", "up")
    return {**dict.fromkeys(names, wide), "down": jax.ShapeDtypeStruct((LAYERS, hidden, width), jnp.float32)}


def test_a_step_on_a_grid_is_the_step_of_one_device():
    num_matrices, num_microbatches = 3, 2
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) / leaf.shape[1] ** 0.5
        for name, leaf in shapes(num_matrices).items()
    }
    batch = jnp.asarray(rng.normal(size=(num_microbatches, TOKENS // num_microbatches, WIDTH)), jnp.float32)
    optimizer = optax.sgd(0.1)

    def loss_fn(params, x):
        for layer in range(LAYERS):
            x = block({name: leaf[layer] for name, leaf in params.items()}, x)
        return jnp.mean(x**2)

    grads = [jax.grad(loss_fn)(params, x) for x in batch]
    wanted = jax.tree.map(lambda param, *grads: param - 0.1 * sum(grads), params, *grads)

    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    state = TrainState((), params, optimizer.init(params), ())
    found, loss = jax.jit(_grid_step(mesh, optimizer))(state, batch)
    # rtol: rounding of float32 sums of 12 products, in another order, through three layers and back.
    assert loss == pytest.approx(float(sum(loss_fn(params, x) for x in batch)), rel=1e-5)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(found.params[name], leaf, rtol=1e-5, atol=1e-6)


def test_masters_on_a_grid_keep_updates_that_their_copies_lose():
    masters = {name: jnp.ones(leaf.shape, jnp.float32) for name, leaf in shapes().items()}
    copies = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters)
    optimizer = optax.chain(optax.scale_by_sign(), optax.scale(-(2.0**-10)))
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    step = jax.jit(_grid_step(mesh, optimizer))
    state = TrainState((), copies, Masters(masters, optimizer.init(masters)), ())
    for count in range(1, 4):
        state, _ = step(state, jnp.ones((1, TOKENS, WIDTH), jnp.bfloat16))
        for name, leaf in state.opt_state.params.items():
            np.testing.assert_array_equal(leaf, 1 - count * 2.0**-10)  # exact in float32
            np.testing.assert_array_equal(state.params[name], leaf.astype(jnp.bfloat16))


def test_a_leaf_is_sharded_as_the_parameter_that_it_mirrors():
    state = jax.eval_shape(optax.adamw(0.1).init, shapes(3))
    shardings = jax.tree_util.tree_map_with_path(lambda path, leaf: (leaf.ndim, _spec(path)), state)
    wide, back = (3, PartitionSpec(None, "fsdp", "tp")), (3, PartitionSpec(None, "tp", "fsdp"))
    adam = shardings[0]
    assert adam.mu == adam.nu == {"gate": wide, "up": wide, "down": back}
    assert adam.count == (0, PartitionSpec())
