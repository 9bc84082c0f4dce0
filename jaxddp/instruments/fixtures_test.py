"""Schedules of what compilers print: those of three versions of JAX, for CPUs, GPUs and TPUs."""

import jax
import pytest

from jaxddp.instruments.schedule import Overlap, read_schedule
from jaxddp.instruments.testdata import fixture_names, load_fixture, schedule_of
from jaxddp.models import abstract

RANKS = tuple(range(8))
MEGABYTE = 1024 * 256 * 4
BUCKETS = [("all-reduce", num_bytes) for num_bytes in (4096, 4160, 5184, 5184, 5184, 5184)]  # caps of 5242 bytes
PLANNED = {
    "naive": sorted(("all-reduce", 4 * leaf.size) for leaf in jax.tree.leaves(abstract("tiny")[1])),
    "bucketed": BUCKETS,
    "auto": [("all-reduce", 4 * 4657)],  # XLA merges all 4656 gradients of one block, and the loss with them
    "microbatch": [("all-reduce", 4 * 272)],
    "loop": [("all-reduce", 192 * 192 * 4)] * 5,  # once in each round
    "products": [],
    "collectives": [(kind, MEGABYTE) for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")],
}
ON_TPU = {  # where a reduce-scatter was asked for
    "collectives": [(kind, MEGABYTE) for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute")]
}
METRICS = {"naive": 1, "bucketed": 1, "microbatch": 1}


def test_every_platform_and_version_is_there():
    for platform, versions in {"cpu": (10, 11, 12), "gpu": (10, 11, 12), "tpu": (10, 12)}.items():
        for version in versions:
            assert f"{platform}-bucketed-jax0.{version}" in fixture_names()
    assert {name.split("-")[1] for name in fixture_names()} == set(PLANNED)


@pytest.mark.parametrize("name", fixture_names())
def test_collectives(name):
    platform, program, version = name.split("-")
    schedule = schedule_of(name)
    collectives = schedule.collectives()
    planned = (ON_TPU if platform == "tpu" else {}).get(program, PLANNED[program])
    assert schedule.gradient_collectives() == planned
    assert sum(c.is_metrics for c in collectives) == METRICS.get(program, 0)
    assert schedule.num_devices == 8
    assert {c.group for c in collectives} <= {RANKS}
    if platform != "gpu":
        assert not any(c.is_async for c in collectives if c.kind != "collective-permute")
    elif program in ("auto", "bucketed", "loop"):
        assert all(c.is_async for c in collectives)
    elif program == "collectives":  # each waits for the one before it, and XLA says so
        assert not any(c.is_async for c in collectives)
    assert not any("collective" in note or "loop" in note for note in schedule.notes)


@pytest.mark.parametrize("name", fixture_names())
def test_what_is_issued_is_waited_for_once_and_later(name):
    def check(operations):
        starts = {operation.name: place for place, operation in enumerate(operations) if operation.starts}
        waits = {operation.waits_for: place for place, operation in enumerate(operations) if operation.waits_for}
        assert starts.keys() == waits.keys()
        assert all(starts[key] <= waits[key] for key in starts)
        for operation in operations:
            check(operation.body)

    check(schedule_of(name).operations)


@pytest.mark.parametrize("name", [*fixture_names("*-naive-*"), *fixture_names("*-bucketed-*")])
def test_buckets_start_during_the_backward_and_naive_starts_all_at_the_end(name):
    """From jax 0.11 on not those so small that XLA's own kernel sums them: it is a fusion, which stays where it is."""
    overlap, platform = schedule_of(name).overlap(), name[:3]
    if "naive" in name or name in ("gpu-bucketed-jax0.11", "gpu-bucketed-jax0.12"):
        assert overlap == Overlap(0, 28_992, 28_992)
        return
    # The last bucket cannot but start after the backward; on CPUs the one before it stands there too.
    assert overlap.bytes_started_after_backward == (2 * 5184 if platform == "cpu" else 5184)
    assert overlap.bytes_in_flight == (28_992 - 5184 if platform == "gpu" else 0)
    assert overlap.num_bytes == 28_992


def matmul_flops(operations):
    return sum(sum(operation.total_work.matmul_flops.values()) for operation in operations)


@pytest.mark.parametrize("name", fixture_names("*-microbatch-*"))
def test_micro_batches_are_one_backward(name):
    schedule = schedule_of(name)
    assert schedule.overlap() == Overlap(0, 1088, 1088)
    # Three times 20 examples through 10 x 16 and 16 x 5: forward, gradients of both, of the second layer's input.
    assert matmul_flops(schedule.operations) == 3 * 2 * 20 * (160 + 80 + 160 + 80 + 80)


@pytest.mark.parametrize("name", fixture_names("*-loop-*"))
def test_loops_count_their_rounds(name):
    schedule = schedule_of(name)
    loops = [operation for operation in schedule.operations if operation.body]
    assert [loop.trips for loop in loops] == [5]
    assert matmul_flops(schedule.operations) == sum(schedule.work().matmul_flops.values()) == 5 * 2 * 192**3


@pytest.mark.parametrize("name", [*fixture_names("*-naive-*"), *fixture_names("*-bucketed-*")])
def test_phases_share_the_products_of_the_step(name):
    """6 sequences of 16 tokens: the head's 64 x 16, and two blocks of 4 x 16 x 16, 3 x 16 x 32 and attention."""
    operations = schedule_of(name).operations
    phases = "forward", "backward", "optimizer"
    forward, backward, optimizer = (matmul_flops(op for op in operations if op.phase == phase) for phase in phases)
    assert forward == 2 * 6 * 16 * (64 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16 * 16))
    assert backward == 2 * forward  # each product has two gradients
    assert optimizer == 0


def test_a_program_printed_without_percent_signs_is_the_same(name="gpu-microbatch-jax0.12"):
    assert read_schedule(load_fixture(name).replace("%", "")) == schedule_of(name)
