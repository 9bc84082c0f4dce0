import math
import re

import numpy as np
import pytest

from jaxddp.comparison_test import refusal
from jaxddp.models import SIZES, abstract
from jaxddp.planning.formulas import (
    Assumptions,
    DeviceRates,
    best_buckets,
    fit_sweep,
    gathered_bytes,
    min_tokens,
    times,
)
from jaxddp.planning.workload import feed_forward, transformer
from jaxddp.tree import named_leaves

MACHINE = DeviceRates(flops_per_s=4e14, fsdp_bytes_per_s=3e11, tp_bytes_per_s=2e11, dp_bytes_per_s=1e11)
MODELS = [
    feed_forward(width=4096, hidden=16384, num_blocks=2, num_matrices=3),
    transformer(vocab=1000, context=512, width=2048, num_layers=4, num_heads=16, hidden=8192),
]
ASSUMED = [
    Assumptions(passes, overlapped, ring, size)
    for passes, overlapped, ring, size in (
        ("forward", False, False, 2), ("backward", False, True, 4), ("both", True, False, 2), ("both", False, True, 2),
        ("forward", True, True, 4),
    )
]  # fmt: skip


def test_the_largest_neighbours_are_gathered():
    units = [10, 1, 1, 6, 6, 1]
    assert [gathered_bytes(units, 2, count) for count in (1, 2, 6, 9)] == [20, 24, 50, 50]
    assert gathered_bytes(units, 2, 1, tp=4) == 5


def test_the_best_number_of_buckets_by_brute_force():
    """Of equal buckets, sent one after the other as each is ready."""
    rng = np.random.default_rng(1)
    for _ in range(100):
        compute, send, latency = rng.uniform(0.01, 1), rng.uniform(0.01, 1), 10 ** rng.uniform(-3, -2)
        counts = np.arange(1, 20 + 2 * math.ceil(compute / latency))
        tails = np.zeros(len(counts))
        for place, count in enumerate(counts):
            ends = compute * np.arange(1, count + 1) / count + (send / count + latency) * np.arange(count, 0, -1)
            tails[place] = ends.max() - compute  # one of them starts as soon as it is ready, the others follow
        best = best_buckets(compute, send * 4e9, 4e9, latency)
        assert best.tail_s <= tails.min() * (1 + 1e-9)  # a real number of buckets is no worse than any whole one
        assert counts[tails.argmin()] in (math.floor(best.num_buckets), math.floor(best.num_buckets) + 1)
        assert best.regime == ("communication-bound" if send >= compute else "compute-bound")


@pytest.mark.parametrize("workload", MODELS)
@pytest.mark.parametrize("ranks", [(16, 4, 1), (8, 1, 4), (1, 8, 1), (4, 2, 8), (1, 1, 1)])
def test_the_least_batch_is_where_the_times_meet(workload, ranks):
    def is_compute_bound(tokens, assumed):
        found = times(workload, MACHINE, tokens, *ranks, assumed)
        return found.compute_s >= found.communication_s(assumed)

    for assumed in ASSUMED:
        least = min_tokens(workload, MACHINE, *ranks, assumed)
        if math.isinf(least):
            assert not is_compute_bound(1e15, assumed)
            continue
        assert is_compute_bound(least * (1 + 1e-9) + 1e-9, assumed)
        assert least == 0 or not is_compute_bound(least * (1 - 1e-9), assumed)


def test_a_sweep_without_sizes_or_growing_times_is_refused():
    for sizes, seconds in (([1e6], [1e-3]), ([1e6, 1e6], [1e-3, 2e-3]), ([1e6, 2e6], [2e-3, 1e-3])):
        assert re.search("two different sizes|must grow", refusal(fit_sweep, sizes, seconds))


@pytest.mark.parametrize("name", ["tiny", "seed_xl"])
def test_the_transformer_is_the_packages_own(name):
    config = SIZES[name]
    sizes = (config.vocab, config.context, config.width, config.num_layers, config.num_heads, config.hidden)
    counts = transformer(*sizes)
    shapes = sorted(tuple(leaf.shape) for leaf in named_leaves(abstract(config)[1]).values())
    assert sorted(shape for _, shape in counts.tensors) == shapes
    assert sum(counts.unit_params) == counts.num_params == config.num_params
    assert sum(counts.unit_tensors) == len(counts.tensors)
