"""What the formulas give for figures of the teaching material, by the ids of docs/published-figures.md.

Figures that are plain arithmetic of a document's own measurements stand on that page alone.
"""

import math

import numpy as np
import pytest

from jaxddp.communication.buckets import MIB, TensorSpec, chunk_elements, plan_buckets
from jaxddp.models import SIZES, abstract
from jaxddp.network import bus_factor
from jaxddp.planning.chips import target
from jaxddp.planning.formulas import (
    FP32,
    MIXED,
    MIXED_ACCUMULATED,
    Assumptions,
    DeviceRates,
    best_buckets,
    gathered_bytes,
    least_ranks,
    min_tokens,
    state_bytes,
    times,
    traffic,
)
from jaxddp.planning.machine import link_rates, machine_of
from jaxddp.planning.plan_test import XL, XXL
from jaxddp.planning.workload import feed_forward, transformer
from jaxddp.tree import named_leaves

GIB = 2**30
STATES = 16 * XXL.num_params


def model(vocab, width, hidden, layers, heads):
    return transformer(vocab, 128, width, layers, heads, hidden)


def check(found, printed):
    """Compares with printed figures of four digits or more: half a unit of the fourth is at most 5e-4 of the figure."""
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(printed, float), rtol=5e-4, atol=0)


def test_parameters():
    for sizes, count in {
        (10_000, 768, 3200, 16, 12): 171_098_880,  # P.xl_seed
        (10_000, 2560, 10_240, 32, 32): 3_406_809_600,  # P.handout25; the others in models/transformer_test.py
        (10_000, 4608, 12_288, 50, 36): 12_832_823_808,  # P.handout26
        (151_936, 4096, 11_008, 34, 32): 8_125_698_048,  # P.leaderboard26
    }.items():
        assert model(*sizes).num_params == count


def held(*arguments):
    return sum(state_bytes(*arguments).values())


def test_bytes_of_the_state():
    by_stage = {  # Z.mem, per parameter on 8 ranks
        FP32: (16, 9, 5.5, 2), MIXED: (16, 5.5, 3.75, 2), MIXED_ACCUMULATED: (20, 9.5, 4.25, 2.5),
    }  # fmt: skip
    for each, printed in by_stage.items():
        assert tuple(held(1, stage, 8, each) for stage in range(4)) == printed
    check([held(7.5e9, stage, 64, MIXED) / 1e9 for stage in range(4)], [120, 31.41, 16.64, 1.875])  # Z.paper
    assert XXL.num_params == 219_848_638_464 and held(XXL.num_params, 0) == STATES  # X.params, X.states
    xl = model(10_000, 2560, 10_240, 32, 32)  # H26.fsdp_accounting: gains of norms are not sharded
    gains = sum(math.prod(shape) for name, shape in xl.tensors if name.endswith("norm"))
    fsdp = held(xl.num_params - gains, 3, 2) + held(gains, 0)
    ddp, sharded = (held(xl.num_params, stage, 2) for stage in (0, 1))
    check(np.array([ddp, sharded, fsdp]) / GIB, [50.765, 38.074, 25.384])


def test_traffic_over_micro_batches():
    for a in range(1, 9):
        rows = {  # Z.comm: reduced every micro-batch, and accumulated
            "bucketed": (2 * a, 2), "zero1": (a + 1, 2), "zero2": (a + 1, 2), "zero3": (3 * a, 2 * a + 1),
            "sharded_optimizer": (2 * a + 1, 3),  # S.zero1_diff, Z.stage1_conflict: 3 against 2
        }  # fmt: skip
        for strategy, totals in rows.items():
            assert (sum(traffic(strategy, a)), sum(traffic(strategy, a, "once"))) == totals


def kept(tokens):
    return 2 * tokens * (XXL.kept_per_token + XXL.kept_cut_per_token)


def fewest(tokens, capacity=95e9, gathered=0.0):
    """Ranks of FSDP that hold the model, with half of the activations on each of two."""
    return least_ranks(STATES + kept(tokens) / 2, kept(tokens) / 2 + gathered, capacity)


def test_devices_that_hold_the_large_model():
    assert kept(1) == 17_547_264  # X.saved_for_backward
    by_tokens = {0: 38, 1024: 41, 4096: 61, 8192: 156, 10_827: 458_080, 10_828: math.inf}  # X.fsdp_nmin
    assert {tokens: fewest(tokens) for tokens in by_tokens} == by_tokens
    assert (fewest(0, 95 * GIB), fewest(0, gathered=gathered_bytes(XXL.unit_params, 2))) == (35, 40)


C, W = 4.6e14, 1.8e11
BOOK = DeviceRates(C, 2 * W, W, 2 * W)
PLAIN, EXACT = Assumptions(), Assumptions(ring_factors=True)


def test_the_books_machine():
    slice_of_64, network = machine_of(target("v5p:64"), "bfloat16")
    assert slice_of_64.chip.flops_per_s["bfloat16"] == C and slice_of_64.torus == (4, 4, 4)
    check(C / (network.gb_per_s * 1e9), 2555.56)  # X.book_2550, X.c_W
    assert link_rates(slice_of_64, network, 16, 4) == BOOK[1:]  # X.c_mesh


def test_the_least_compute_bound_batch():
    for rates, assumed, tokens in (  # X.c_answer
        (BOOK, PLAIN, 25301.7), (BOOK._replace(flops_per_s=4.59e14), PLAIN, 25233.7), (BOOK, EXACT, 22390.5),
        (DeviceRates(C, 2 * 9e10, 9e10, 9e10), PLAIN, 66372.4), (DeviceRates(C, W, W, W), PLAIN, 50603.4),
        (DeviceRates(C, 2 * 2.9e10, 2.9e10, 2.9e10), PLAIN, math.inf),
    ):  # fmt: skip
        check(min_tokens(XXL, rates, 16, 4, 1, assumed), tokens)
    one = times(XXL, BOOK, 1, 16, 4, 1, PLAIN)
    check(one.fsdp_s / one.compute_s, 20444.4)  # if the collectives overlap
    for rates, ring, tokens in (  # of both passes; X.c_blog_fixed, each of 16 FSDP ranks
        (BOOK, False, 23445.0), (DeviceRates(C, 2.9e10, 2.9e10, 2.9e10), True, 16 * 36788.7),
        (DeviceRates(C, W, W, W), True, 16 * 2650.22),
    ):  # fmt: skip
        passes = (times(XXL, rates, 1, 16, 4, 1, Assumptions(name, ring)) for name in ("forward", "backward"))
        compute_s, fsdp_s, tp_s, _ = np.add(*passes)
        check(fsdp_s / (compute_s - tp_s), tokens)


# The handout of 2026, H26: three matrices, one egress rate, exact ring bytes. Any sizes work, since D cancels.

B, D, F = 300_000.0, 5120.0, 17_000.0
GATED = feed_forward(width=int(D), hidden=int(F), num_matrices=3)
HC, HW = 989.4e12, 450e9
H100 = DeviceRates(HC, HW, HW, HW)
FORWARD, BACKWARD = (Assumptions(passes, ring_factors=True) for passes in ("forward", "backward"))


@pytest.mark.parametrize("n", [2, 8, 64])
def test_the_handouts_times(n):
    ring = (n - 1) / n
    found = times(GATED, H100, B, 1, 1, n, BACKWARD)
    check([found.compute_s, found.dp_s], [12 * B * D * F / n / HC, 12 * ring * D * F / HW])  # dp_a, dp_b
    for assumed, count in ((FORWARD, 1), (BACKWARD, 2)):
        fsdp, tp = times(GATED, H100, B, n, 1, 1, assumed), times(GATED, H100, B, 1, n, 1, assumed)
        compute_s = 6 * count * B * D * F / n / HC
        check([fsdp.compute_s, fsdp.fsdp_s], [compute_s, 6 * count * ring * D * F / HW])  # fsdp_a, fsdp_b
        check([tp.compute_s, tp.tp_s], [compute_s, 4 * ring * B * D / HW])  # tp_b, tp_c
        # dp_c, fsdp_c, tp_d: as many ranks as keep a batch compute-bound
        check(min_tokens(GATED, H100, 1 + B * HW / HC, 1, 1, assumed), B)
        found = times(GATED, H100, B, 1, 1 + 1.5 * count * F * HW / HC, 1, assumed)
        check(found.tp_s, found.compute_s)
    theirs = 6 * D * F / 8 * ring / HW, 4 * B * D / n * 7 / 8 / HW
    check(times(GATED, H100, B, n, 8, 1, FORWARD)[1:3], theirs)  # 2d_b


def test_bus_factors():
    for kind, factors in (("all-reduce", (1, 1.75)), ("all-gather", (0.5, 0.875)), ("broadcast", (1, 1))):  # C.busbw
        assert (bus_factor(kind, 2), bus_factor(kind, 8)) == factors


def exposed_s(compute_s, num_bytes, bytes_per_s, latency_s):
    """What buckets sent over one stream leave over after the last gradient, bucket by bucket."""
    ready = end = 0.0
    for computed, size in zip(compute_s, num_bytes, strict=True):
        ready += computed
        end = max(ready, end) + size / bytes_per_s + latency_s
    return end - ready


def test_the_best_number_of_equal_buckets():
    s, w, o = 684_395_520, 4.0056e9, 8.995e-5  # B.fit_predict
    best = [*best_buckets(s / w, s, w, o).values()]
    check(best[:3], [43.58, 14.98 * MIB, 7.841e-3])
    check(best[:3], [math.sqrt(s / (w * o)), math.sqrt(s * w * o), 2 * math.sqrt(s * o / w)])  # B.optimum
    check(best_buckets(59.17e-3, s, w, o)["num_buckets"], 25.65)
    check(exposed_s([s / (7 * w)] * 7, [s / 7] * 7, w, o), s / (7 * w) + 7 * o)  # B.overhead
    check(exposed_s([0.1 / 40] * 40, [1e9 / 40] * 40, 4e9, 1e-4), 0.1 / 40 + 0.25 + 40e-4 - 0.1)  # B.general


def specs_of(tensors):
    return [TensorSpec(name, shape, "float32") for name, shape in reversed(tensors)]


def norms_last(tensors):
    """Moves each block's norms after its matrices, like a module that registers them last."""
    blocks = [tensors[start : start + 9] for start in range(1, len(tensors) - 2, 9)]
    moved = [entry for block in blocks for entry in sorted(block, key=lambda entry: "_norm" in entry[0])]
    return (tensors[0], *moved, *tensors[-2:])


@pytest.mark.parametrize(
    ("cap_mb", "ours", "torchs", "tail_ms"),
    [(1, 130, 114, 126.0), (10, 66, 34, 120.3), (25, 34, 23, None), (100, 7, 7, 121.3), (1000, 1, 2, 170.9)],
)
def test_buckets_of_a_real_model(cap_mb, ours, torchs, tail_ms):
    specs = specs_of(norms_last(XL.tensors))
    plan = plan_buckets(specs, cap_mb)
    torch = plan_buckets(specs, [1.0, float(cap_mb)], rule="torch")
    assert (len(plan.buckets), len(torch.buckets)) == (ours, torchs)  # B.bucket_counts
    if tail_ms is not None:  # B.fit_simulated: a backward of 59.17 ms, and 170.86 ms to send everything
        sizes = [bucket.num_bytes for bucket in plan.buckets]
        compute_s = [size / sum(sizes) * 59.17e-3 for size in sizes]
        check(exposed_s(compute_s, sizes, sum(sizes) / 170.86e-3, 8.995e-5), tail_ms * 1e-3)


def test_small_buckets():
    layers = [("layer1.weight", (200,)), ("layer1.bias", (20,)), ("layer2.weight", (100,)), ("layer2.bias", (5,))]
    cuts = [
        [len(bucket.tensors) for bucket in plan_buckets(specs_of(layers), cap / MIB).buckets] for cap in range(1, 1301)
    ]
    assert [2, 2] not in cuts and cuts[-1] == [4]  # S1.buckets: no cap gives layer 2, then layer 1
    assert [chunk_elements(count, 2) for count in (105, 220, 325)] == [53, 110, 163]  # S1.rs_shape


MACHINE = DeviceRates(flops_per_s=4e14, fsdp_bytes_per_s=3e11, tp_bytes_per_s=2e11, dp_bytes_per_s=1e11)
MODELS = [
    feed_forward(width=4096, hidden=16384, num_blocks=2, num_matrices=3),
    transformer(vocab=1000, context=512, width=2048, num_layers=4, num_heads=16, hidden=8192),
]
ASSUMED = [
    Assumptions("forward", False, False, 2), Assumptions("backward", True, False, 4),
    Assumptions("backward", True, True, 2),
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
        assert best["tail_s"] <= tails.min() * (1 + 1e-9)  # a real number of buckets is no worse than any whole one
        assert counts[tails.argmin()] in (math.floor(best["num_buckets"]), math.floor(best["num_buckets"]) + 1)
        assert best["regime"] == ("communication-bound" if send >= compute else "compute-bound")


@pytest.mark.parametrize("workload", MODELS)
@pytest.mark.parametrize("ranks", [(16, 4, 1), (8, 1, 4), (1, 8, 1), (4, 2, 8), (1, 1, 1)])
def test_the_least_batch_is_where_the_times_meet(workload, ranks):
    def is_compute_bound(tokens, assumed):
        found = times(workload, MACHINE, tokens, *ranks, assumed)
        return found.compute_s >= sum(found[1:])

    for assumed in ASSUMED:
        least = min_tokens(workload, MACHINE, *ranks, assumed)
        if math.isinf(least):
            assert not is_compute_bound(1e15, assumed)
            continue
        assert is_compute_bound(least * (1 + 1e-9) + 1e-9, assumed)
        assert least == 0 or not is_compute_bound(least * (1 - 1e-9), assumed)


@pytest.mark.parametrize("name", ["tiny", "seed_xl"])
def test_the_transformer_is_the_packages_own(name):
    config = SIZES[name]
    sizes = (config.vocab, config.context, config.width, config.num_layers, config.num_heads, config.hidden)
    counts = transformer(*sizes)
    shapes = sorted(tuple(leaf.shape) for leaf in named_leaves(abstract(config)[1]).values())
    assert sorted(shape for _, shape in counts.tensors) == shapes
    assert sum(counts.unit_params) == counts.num_params == config.num_params
    assert sum(counts.unit_tensors) == len(counts.tensors)
