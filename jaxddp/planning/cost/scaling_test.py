import math

import pytest

from jaxddp.planning.cost.scaling import Assumptions, DeviceRates, accumulated_min_tokens, min_tokens, times
from jaxddp.planning.cost.workload import feed_forward, transformer

MACHINE = DeviceRates(flops_per_s=4e14, fsdp_bytes_per_s=3e11, tp_bytes_per_s=2e11, dp_bytes_per_s=1e11)
MODELS = [
    feed_forward(width=4096, hidden=16384, num_blocks=3),
    feed_forward(width=4096, hidden=16384, num_blocks=2, num_matrices=3),
    transformer(vocab=1000, context=512, width=2048, num_layers=4, num_heads=16, hidden=8192),
]
EVERY = [
    Assumptions(passes=passes, overlapped_axes=overlapped, ring_factors=ring, element_bytes=size)
    for passes in ("forward", "backward", "both")
    for overlapped in (False, True)
    for ring in (False, True)
    for size in (2, 4)
]


def is_compute_bound(workload, tokens, ranks, assumptions):
    found = times(workload, MACHINE, tokens, *ranks, assumptions)
    return found.compute_s >= found.communication_s(assumptions)


@pytest.mark.parametrize("workload", MODELS)
@pytest.mark.parametrize("ranks", [(16, 4, 1), (8, 1, 4), (1, 8, 1), (4, 2, 8), (1, 1, 16), (1, 1, 1)])
def test_the_least_batch_is_where_the_times_meet(workload, ranks):
    for assumptions in EVERY:
        least = float(min_tokens(workload, MACHINE, *ranks, assumptions))
        if math.isinf(least):
            assert not is_compute_bound(workload, 1e15, ranks, assumptions)
            continue
        assert is_compute_bound(workload, least * (1 + 1e-9) + 1e-9, ranks, assumptions)
        assert least == 0 or not is_compute_bound(workload, least * (1 - 1e-9), ranks, assumptions)


def test_times_are_those_of_the_collectives_that_they_stand_for():
    """Bytes that the ranks of each group really pass on over their rings, pass by pass."""
    model, tokens, (x, y, r) = MODELS[0], 4096, (4, 2, 3)
    found = times(model, MACHINE, tokens, x, y, r, Assumptions(passes="both", ring_factors=True))
    shard_bytes = 2 * model.num_params / (x * y)
    gather = (x - 1) * shard_bytes  # a rank passes x - 1 shards on to gather, and as many to scatter
    assert found.fsdp_s == pytest.approx(3 * gather / 3e11, rel=1e-12)  # rounding, as below
    local_tokens = tokens / (x * r)
    part = 2 * local_tokens * model.summed_per_token / y
    assert found.tp_s == pytest.approx(2 * 2 * (y - 1) * part / 2e11, rel=1e-12)  # twice there and back
    assert found.dp_s == pytest.approx(2 * (r - 1) * shard_bytes / r / 1e11, rel=1e-12)
    assert found.compute_s == pytest.approx(3 * model.flops_per_token * local_tokens / y / 4e14, rel=1e-12)


def test_accumulation_does_not_lower_the_batch():
    model, ranks = MODELS[0], (16, 4, 1)
    least = float(min_tokens(model, MACHINE, *ranks))
    for steps in (1, 2, 7):
        total = float(accumulated_min_tokens(least, steps, gathers_every=True))
        for scale, expected in ((1 + 1e-9, True), (1 - 1e-9, False)):
            one = times(model, MACHINE, total * scale / steps, *ranks)
            # All micro-batches together: each computes, gathers, and sums its activations.
            assert (steps * one.compute_s >= steps * (one.fsdp_s + one.tp_s)) == expected
    backward, replicas = Assumptions(passes="backward"), (1, 1, 16)
    least = float(min_tokens(model, MACHINE, *replicas, backward))
    for steps in (1, 2, 7):
        total = float(accumulated_min_tokens(least, steps, gathers_every=False))
        one = times(model, MACHINE, total / steps, *replicas, backward)
        assert steps * one.compute_s == pytest.approx(one.dp_s, rel=1e-9)  # summed once, of all micro-batches
        assert total == least


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: DeviceRates(0, 1, 1), r"flops_per_s \(=0\) must be a positive finite number"),
        (lambda: DeviceRates(1, 1, 1, -1), r"dp_bytes_per_s \(=-1\) must be a positive finite number"),
        (lambda: Assumptions(passes="none"), r"passes \(='none'\) must be one of forward, backward, both"),
        (lambda: Assumptions(element_bytes=0), r"element_bytes \(=0\) must be a positive finite number"),
        (lambda: min_tokens(MODELS[0], MACHINE, 0, 1), r"fsdp \(=0\) must be a whole number, 1 or more"),
        (lambda: min_tokens(MODELS[0], MACHINE, 1, [2, 1.5]), r"tp \(=1.5\) must be a whole number, 1 or more"),
        (lambda: times(MODELS[0], MACHINE, -1, 1, 1), r"tokens \(=-1\) must be a finite number, 0 or more"),
        (
            lambda: accumulated_min_tokens(1.0, 0, gathers_every=True),
            r"num_microbatches \(=0\) must be a whole number, 1 or more",
        ),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        call()
