import math
from dataclasses import replace

import numpy as np
import pytest

from jaxddp.planning.cost.scaling import Assumptions, DeviceRates, best_split, min_tokens, times
from jaxddp.planning.cost.testdata.closed_forms import (
    continuous_split,
    most_fsdp_ranks,
    most_ranks,
    most_tp_ranks,
)
from jaxddp.planning.cost.workload import feed_forward

MODEL = feed_forward(width=4096, hidden=53248, num_matrices=3)
GPU = DeviceRates(989.4e12, 450e9, 450e9)
TPU = DeviceRates(4.6e14, 3.6e11, 1.8e11)
PLAIN, OVERLAPPED = Assumptions(), Assumptions(overlapped_axes=True)
EXACT = Assumptions(ring_factors=True)


@pytest.mark.parametrize("assumptions", [PLAIN, OVERLAPPED, EXACT, Assumptions("backward", ring_factors=True)])
@pytest.mark.parametrize("tokens", [2e4, 3e5])
def test_a_limit_is_the_last_count_that_is_compute_bound(assumptions, tokens):
    most = math.floor(most_fsdp_ranks(MODEL, GPU, tokens, assumptions))
    assert (
        min_tokens(MODEL, GPU, most, 1, 1, assumptions) <= tokens < min_tokens(MODEL, GPU, most + 1, 1, 1, assumptions)
    )
    most = math.floor(most_tp_ranks(MODEL, GPU, assumptions))
    assert min_tokens(MODEL, GPU, 1, most, 1, assumptions) == 0
    assert min_tokens(MODEL, GPU, 1, most + 1, 1, assumptions) == math.inf


@pytest.mark.parametrize("assumptions", [PLAIN, OVERLAPPED, EXACT, replace(EXACT, overlapped_axes=True)])
def test_the_most_ranks_by_brute_force(assumptions):
    tokens = 400_000.0
    x, y = np.meshgrid(np.arange(2, 600), np.arange(2, 120))
    found = times(MODEL, GPU, tokens, x, y, 1, assumptions)
    busy = found.compute_s >= found.communication_s(assumptions)
    best = (x * y)[busy].max()
    most = most_ranks(MODEL, GPU, tokens, assumptions)
    ideal = float(most.fsdp * most.tp)
    # Whole factors lose less than one of each.
    assert (most.fsdp - 1) * (most.tp - 1) <= best <= ideal
    assert most.fsdp > 2 and most.tp > 2


def test_overlapped_axes_keep_four_times_as_many_busy():
    counts = [most_ranks(MODEL, GPU, 1e12, assumptions) for assumptions in (PLAIN, OVERLAPPED)]
    assert counts[1].fsdp * counts[1].tp == pytest.approx(4 * counts[0].fsdp * counts[0].tp)


def test_the_continuous_optimum_by_brute_force():
    n = 64
    fsdp = np.geomspace(1.5, 40, 20_001)
    for assumptions in (PLAIN, OVERLAPPED):
        best = continuous_split(MODEL, TPU, n, assumptions=assumptions)
        # The formulas of the times take fractions as well; the check that ranks are whole does not.
        fixed = 2 * MODEL.num_params * fsdp / (n * TPU.fsdp_bytes_per_s)
        per_token = 4 * MODEL.summed_per_token / (fsdp * TPU.tp_bytes_per_s)
        compute = MODEL.flops_per_token / (n * TPU.flops_per_s)
        if assumptions.overlapped_axes:
            least = np.where(compute >= per_token, fixed / compute, np.inf)
        else:
            least = np.where(compute > per_token, fixed / np.where(compute > per_token, compute - per_token, 1), np.inf)
        assert best.tokens == pytest.approx(least.min(), rel=1e-3)  # of the grid
        assert best.fsdp == pytest.approx(fsdp[least.argmin()], rel=1e-3 if assumptions.overlapped_axes else 0.02)
        assert best.fsdp * best.tp == pytest.approx(n)
    given = continuous_split(MODEL, TPU, n, tokens=1e6)
    communicate = 2 * MODEL.num_params * fsdp / (n * 3.6e11) + 4e6 * MODEL.summed_per_token / (fsdp * 1.8e11)
    assert fsdp[communicate.argmin()] == pytest.approx(min(given.fsdp, 40), rel=1e-3)


def test_the_best_split_is_one_of_the_divisors():
    best = best_split(MODEL, lambda fsdp, tp: TPU, 60)
    tried = {(x, 60 // x): float(min_tokens(MODEL, TPU, x, 60 // x)) for x in range(1, 61) if 60 % x == 0}
    assert tried[best.fsdp, best.tp] == best.tokens == min(tried.values())
    slow = replace(TPU, fsdp_bytes_per_s=1e9)
    assert best_split(MODEL, lambda fsdp, tp: TPU if fsdp == 30 else slow, 60).fsdp == 30


def test_what_lowers_the_batch():
    model, least = feed_forward(16384, 53248), 25_302
    assert best_split(model, lambda fsdp, tp: TPU, 64).tokens < least  # a better split
    more_axes = replace(TPU, tp_bytes_per_s=2 * TPU.tp_bytes_per_s)
    narrow = Assumptions(element_bytes=1)
    for machine, assumptions in ((TPU, OVERLAPPED), (more_axes, PLAIN), (TPU, narrow)):
        assert min_tokens(model, machine, 16, 4, 1, assumptions) < least


def test_bad_input():
    with pytest.raises(ValueError, match=r"^num_devices \(=0\) must be a whole number, 1 or more$"):
        best_split(MODEL, lambda fsdp, tp: TPU, 0)
