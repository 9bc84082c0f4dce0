"""Rows on buckets: the overhead model and its optimum, real compositions, predicted against measured sweeps."""

from __future__ import annotations

import math

import numpy as np

from ....communication.buckets import MIB, BucketPlan, TensorSpec, chunk_elements, plan_buckets
from ..memory import exact_bucket_bytes
from ..overlap import Optimum, bucket_times_s, finish_s, uniform_optimum, uniform_tail_s
from ..workload import Shapes, transformer
from . import Row, check_printed, checks, load_rows

XL = transformer(vocab=10_000, context=128, width=768, num_layers=16, num_heads=12, hidden=3200)
S_BYTES = 684_395_520


def backward_specs(tensors: Shapes) -> list[TensorSpec]:
    """A model's gradients in reversed forward order."""
    return [TensorSpec(name, shape, "float32") for name, shape in reversed(tensors)]


def norms_last(tensors: Shapes) -> Shapes:
    """Moves each block's norms after its matrices, like a module that registers them last."""
    blocks = [tensors[start : start + 9] for start in range(1, len(tensors) - 2, 9)]
    moved = [entry for block in blocks for entry in sorted(block, key=lambda entry: "_norm" in entry[0])]
    return (tensors[0], *moved, *tensors[-2:])


def handout_tail_s(num_bytes: float, num_buckets: float, bytes_per_s: float, latency_s: float) -> float:
    """T(n) = s/(n w) + n o, the special case C = s/w."""
    return float(uniform_tail_s(num_bytes / bytes_per_s, num_bytes, num_buckets, bytes_per_s, latency_s))


def handout_optimum(num_bytes: float, bytes_per_s: float, latency_s: float) -> Optimum:
    """The optimum of the special case C = s/w."""
    return uniform_optimum(num_bytes / bytes_per_s, num_bytes, bytes_per_s, latency_s)


def in_mib(num_bytes: int) -> float:
    """Bytes in MiB."""
    return num_bytes / MIB


@checks("B.overhead")
def _(row: Row) -> None:
    s, w, o = 1e9, 4e9, 1e-4
    for n in (1, 7, 130):
        c = s / (n * w)
        ready, send = np.cumsum([c] * n), [c + o] * n
        simulated = finish_s(ready, send) - n * c
        assert math.isclose(simulated, s / (n * w) + n * o, rel_tol=1e-12)  # rounding of n sums
        assert math.isclose(handout_tail_s(s, n, w, o), simulated, rel_tol=1e-12)
        # If compute takes as long as sending with its latency, only the last bucket is exposed.
        other = finish_s(np.cumsum([c + o] * n), send) - n * (c + o)
        assert math.isclose(other, s / (n * w) + o, rel_tol=1e-9)  # the difference of sums 200 times as large
    assert row["our_value"] == "same, exact (simulated)"


@checks("B.optimum")
def _(row: Row) -> None:
    s, w, o = 684e6, 4e9, 9e-5
    best = handout_optimum(s, w, o)
    expected = (math.sqrt(s / (w * o)), math.sqrt(s * w * o), 2 * math.sqrt(s * o / w))
    assert np.allclose(best[:3], expected, rtol=1e-12, atol=0) and "T* = 2*sqrt(s*o/w)" in row["our_value"]


@checks("B.general")
def _(row: Row) -> None:
    w, o, n = 4e9, 1e-4, 40
    for s in (2e8, 1e9):
        c = 0.1
        formula = max(c / n + s / w + n * o - c, s / (n * w) + o)
        assert math.isclose(uniform_tail_s(c, s, n, w, o), formula, rel_tol=1e-12)
        best = uniform_optimum(c, s, w, o)
        assert math.isclose(best.num_buckets, max(math.sqrt(c / o), (c - s / w) / o), rel_tol=1e-12)
    assert "n* = max(sqrt(C/o), (C-s/w)/o)" in row["our_value"]


@checks("B.bucket_counts")
def _(row: Row) -> None:
    orders = {"attn_ffn_ln": norms_last(XL.tensors), "ln_attn_ln_ffn": XL.tensors}
    for key, printed in row["our_value"].items():
        order, _, cap = key.partition("@")
        specs = backward_specs(orders[order])
        before = plan_buckets(specs, float(cap)).buckets
        torch = plan_buckets(specs, [1.0, float(cap)], rule="torch").buckets
        ours = {
            "n_blog": len(before),
            "largest_MiB": in_mib(max(bucket.num_bytes for bucket in before)),
            "last_MiB": in_mib(before[-1].num_bytes),
            "n_pytorch": len(torch),
            "pytorch_largest_MiB": in_mib(max(bucket.num_bytes for bucket in torch)),
            "pytorch_last_MiB": in_mib(torch[-1].num_bytes),
        }
        check_printed(ours, printed)


@checks("B.fit_predict")
def _(row: Row) -> None:
    s, o, w = row["inputs"]["s_bytes"], row["inputs"]["o_ms"] * 1e-3, row["inputs"]["w_GBps"] * 1e9
    backward_s = 59.17e-3  # of B.fit_simulated
    special, real = handout_optimum(s, w, o), uniform_optimum(backward_s, s, w, o)
    slow = handout_optimum(s, w, 0.25e-3), uniform_optimum(backward_s, s, w, 0.25e-3)
    ours = {
        "n_star": special.num_buckets,
        "b_star_MB": special.bucket_bytes / 1e6,
        "b_star_MiB": special.bucket_bytes / MIB,
        "T_star_ms": special.tail_s * 1e3,
        "commbound_n_star": real.num_buckets,
        "commbound_b_star_MiB": real.bucket_bytes / MIB,
        "b_star_MiB_if_o_0p25ms": slow[0].bucket_bytes / MIB,
        "commbound_b_star_MiB_if_o_0p25ms": slow[1].bucket_bytes / MIB,
    }
    check_printed(ours, row["our_value"])
    assert real.regime == "communication-bound"


@checks("B.fit_simulated")
def _(row: Row) -> None:
    backward_s, rate = row["inputs"]["C_bwd_ms"] * 1e-3, S_BYTES / (row["inputs"]["s_over_w_ms"] * 1e-3)
    measured = {point["variant"]: point["step_ms"] for point in row["document_value"]}
    specs = backward_specs(norms_last(XL.tensors))
    sizes = [spec.num_bytes for spec in specs]
    ready_s = np.cumsum(sizes) / sum(sizes) * backward_s
    place = {spec.name: index for index, spec in enumerate(specs)}

    def tail_ms(plan: BucketPlan, latency_s: float) -> float:
        buckets = [[place[tensor.name] for tensor in bucket.tensors] for bucket in plan.buckets]
        return (float(finish_s(*bucket_times_s(buckets, sizes, ready_s, rate, latency_s))) - backward_s) * 1e3

    fitted_s = 0.08995e-3
    # One bucket starts when the backward ends, so its tail is all of its communication.
    alone_ms = measured["bucketed_1000mb"] - tail_ms(plan_buckets(specs, 1000), fitted_s)
    # Without buckets nothing is copied; the measured wait and division come on top of compute.
    waits = {each["variant"]: each["comm_mean_ms"] for each in load_rows()["T3.buckets"]["document_value"]}
    alone_without_buckets_ms = row["inputs"]["compute_only_mbs8_ms"] + waits["overlap"]
    for name, printed in row["our_value"].items():
        in_buckets = name.startswith("bucketed")
        cap = float(name.removeprefix("bucketed_").removesuffix("mb")) if in_buckets else 1e-9
        plan = plan_buckets(specs, cap)
        for key, latency_s in {"o_fit": fitted_s, "o=0.25ms": 0.25e-3}.items():
            if key in printed:
                tail = tail_ms(plan, latency_s)
                step_ms = tail + (alone_ms if in_buckets else alone_without_buckets_ms)
                check_printed({"n_b": len(plan.buckets), "tail_ms": tail, "step_ms": step_ms}, printed[key])
        assert printed["measured_step_ms"] == measured[name.partition("(")[0]]
        if "measured_exposed_ms" in printed:
            check_printed(measured[name] - alone_ms, printed["measured_exposed_ms"])
            handout_s = handout_tail_s(S_BYTES, len(plan.buckets), rate, fitted_s)
            check_printed(handout_s * 1e3, printed["handout_model_tail_ms_o_fit"])


@checks("B.percall_from_naive_flat")
def _(row: Row) -> None:
    given = row["inputs"]
    pass_ms = 2 * S_BYTES / (given["mem_bw_GBps"] * 1e9) * 1e3  # read and written
    saved_ms = given["naive_ms"] - given["flat_ms"]
    ours = {
        "lower_o_ms": saved_ms / (given["calls"] - 1),
        "with_copies_o_ms": (saved_ms + 2 * pass_ms) / (given["calls"] - 1),
        "s_over_w_predicted_ms": handout_tail_s(S_BYTES, 1, 4.0056e9, 0.0) * 1e3,
        "flat_minus_3_passes_ms": given["flat_ms"] - 3 * pass_ms,
    }
    check_printed(ours, row["our_value"])


@checks("S1.buckets")
def _(row: Row) -> None:
    layers = [("layer1.weight", 200), ("layer1.bias", 20), ("layer2.weight", 100), ("layer2.bias", 5)]
    specs = [TensorSpec(name, (count,), "float32") for name, count in reversed(layers)]
    ours, printed = sum(spec.num_elements for spec in specs), row["our_value"]
    check_printed([ours, 4 * ours], [printed["params"], printed["bytes"]])
    assert len(plan_buckets(specs, 25).buckets) == printed["buckets_at_25MiB"] == 1
    by_layer = [["layer2.bias", "layer2.weight"], ["layer1.bias", "layer1.weight"]]
    compositions = [
        [[tensor.name for tensor in bucket.tensors] for bucket in plan_buckets(specs, cap / MIB).buckets]
        for cap in range(1, 1301)
    ]
    assert by_layer not in compositions and printed["cap_that_gives_layer2_then_layer1"].startswith("none")


@checks("S1.rs_shape")
def _(row: Row) -> None:
    for numel, printed in row["our_value"].items():
        count, ranks = int(numel), row["inputs"]["N"]
        chunk = chunk_elements(count, ranks)
        assert [chunk, count - chunk] == printed["chunks"] and count // ranks == printed["partition"]
        padding = exact_bucket_bytes([count], ranks, 1) - count
        assert (padding == 0) is printed["ok"]


@checks("S3.bucket_elems")
def _(row: Row) -> None:
    cap = row["inputs"]["cap_MB"]
    for key, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        most = row["our_value"][key]
        for count, num_buckets in ((most, 1), (most + 1, 2)):
            halves = [TensorSpec("a", (count - 1,), dtype), TensorSpec("b", (1,), dtype)]
            assert len(plan_buckets(halves, cap).buckets) == num_buckets


@checks("S4.model")
def _(row: Row) -> None:
    shapes = {"fc2.bias": (10,), "fc2.weight": (10, 1024), "fc1.bias": (1024,), "fc1.weight": (1024, 512)}
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    ours = {
        "params": sum(spec.num_elements for spec in specs),
        "MiB": in_mib(sum(spec.num_bytes for spec in specs)),
        "buckets_pytorch_order": len(plan_buckets(specs, [1, 25], rule="torch").buckets),
        "buckets_blog_rule": len(plan_buckets(specs, 25).buckets),
    }
    check_printed(ours, row["our_value"])
