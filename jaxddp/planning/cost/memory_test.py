import math

import numpy as np
import pytest

from jaxddp.planning.cost.memory import (
    FP32,
    MIXED,
    MIXED_ACCUMULATED,
    STAGES,
    PerParameter,
    activation_bytes,
    exact_bucket_bytes,
    exact_state_bytes,
    gathered_bytes,
    least_ranks,
    state_bytes,
)

LEAVES = [1, 7, 12, 105, 220]
STATES = (FP32, MIXED, MIXED_ACCUMULATED)


def held_by_rank(rank, num_ranks, leaf_elements, stage):
    """Lists what a rank holds of each leaf, padded with None: parameters, gradients, state of each element."""

    def part(elements, is_cut):
        padded = list(range(elements)) + [None] * (-elements % num_ranks)
        chunk = len(padded) // num_ranks
        return padded[rank * chunk : (rank + 1) * chunk] if is_cut else list(range(elements))

    return [[part(elements, stage >= least) for elements in leaf_elements] for least in (3, 2, 1)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 64])
def test_exact_bytes_are_those_of_padded_chunks(stage, num_ranks):
    ours = exact_state_bytes(LEAVES, stage, num_ranks, MIXED)
    for rank in range(num_ranks):
        counts = [sum(map(len, leaves)) for leaves in held_by_rank(rank, num_ranks, LEAVES, stage)]
        assert ours == tuple(count * each for count, each in zip(counts, MIXED[:3], strict=True))
    owned = [held_by_rank(rank, num_ranks, LEAVES, 3)[0] for rank in range(num_ranks)]
    for place, elements in enumerate(LEAVES):  # the chunks of all ranks are the leaf, once
        joined = [element for leaves in owned for element in leaves[place] if element is not None]
        assert joined == list(range(elements))


@pytest.mark.parametrize("per_parameter", STATES)
@pytest.mark.parametrize("accumulate", ["shards", "full"])
def test_without_padding_exact_bytes_are_the_formulas(per_parameter, accumulate):
    leaves = [64, 640, 6400]
    for stage in STAGES:
        for num_ranks in (1, 2, 64):
            exact = exact_state_bytes(leaves, stage, num_ranks, per_parameter, accumulate)
            assert exact == state_bytes(sum(leaves), stage, num_ranks, per_parameter, accumulate)
            assert all(isinstance(num_bytes, int) for num_bytes in exact)


def test_local_sums_stay_whole():
    """The accumulator, or the gradient itself where there is none, from stage 2 on."""
    for stage in STAGES:
        for per_parameter in STATES:
            shards, full = (state_bytes(1, stage, 8, per_parameter, accumulate) for accumulate in ("shards", "full"))
            summed = per_parameter.accumulator or per_parameter.gradient
            assert full.gradients - shards.gradients == (summed * 7 / 8 if stage >= 2 else 0)


def test_the_least_number_of_ranks_is_the_first_that_fits():
    rng = np.random.default_rng(0)
    counts = np.arange(1, 5000)
    for _ in range(200):
        cut, whole, capacity = rng.uniform(1, 1000), rng.uniform(0, 2), rng.uniform(1, 3)
        fits = counts[cut / counts + whole < capacity]
        least = least_ranks(cut, whole, capacity)
        assert least == (fits[0] if len(fits) else least) and (whole < capacity) == math.isfinite(least)
    assert least_ranks([1.0, 2.0], [0.5, 3.0], 2.0).tolist() == [1, math.inf]


def test_the_largest_neighbours_are_gathered():
    units = [10, 1, 1, 6, 6, 1]
    assert [gathered_bytes(units, 2, count) for count in (1, 2, 6, 9)] == [20, 24, 50, 50]
    assert gathered_bytes(units, 2, 1, tp=4) == 5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: state_bytes(10, 4), "stage (=4) must be one of 0, 1, 2, 3"),
        (lambda: state_bytes(-1, 0), "num_params (=-1) must be a finite number, 0 or more"),
        (lambda: state_bytes(10, 1, 0), "num_ranks (=0) must be a whole number, 1 or more"),
        (lambda: state_bytes(10, 1, 2, accumulate="half"), "accumulate (='half') must be one of shards, full"),
        (
            lambda: state_bytes(1, 0, 1, PerParameter(4, -4, 8)),
            "per_parameter (=-4) must be a finite number, 0 or more",
        ),
        (lambda: exact_state_bytes([3, -1], 0, 2), "leaf_elements (=-1) must be a whole number, 0 or more"),
        (lambda: exact_bucket_bytes([3], 2, 0), "element_bytes (=0) must be a whole number, 1 or more"),
        (lambda: gathered_bytes([3], 2, 0), "num_units (=0) must be a whole number, 1 or more"),
        (lambda: activation_bytes(-1, 1), "tokens (=-1) must be a finite number, 0 or more"),
        (lambda: least_ranks(1, 1, 0), "capacity_bytes (=0) must be a positive finite number"),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == said
