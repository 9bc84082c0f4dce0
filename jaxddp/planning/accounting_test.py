"""The accounting of the teaching material: the formulas of this package give the right value of every figure.

``testdata/accounting.json`` has a row for each figure, with the document's value and the right one, ``our_value``.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxddp.communication.buckets import MIB, TensorSpec, chunk_elements, plan_buckets
from jaxddp.network import bus_factor
from jaxddp.planning.chips import target
from jaxddp.planning.formulas import (
    FP32,
    MIXED,
    MIXED_ACCUMULATED,
    STAGES,
    Assumptions,
    DeviceRates,
    PerParameter,
    activation_bytes,
    best_split,
    bucket_times_s,
    finish_s,
    fit_sweep,
    gathered_bytes,
    least_ranks,
    min_tokens,
    state_bytes,
    times,
    traffic,
    uniform_optimum,
    uniform_tail_s,
)
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.workload import feed_forward, transformer

GIB = 2**30
ROWS = {row["id"]: row for row in json.loads((Path(__file__).parent / "testdata/accounting.json").read_text())}
# Rows whose right value is a statement.
IN_WORDS = {
    "B.w_definition", "X.d", "H26.tp_a", "S1.avg", "S1.partition_consistency", "N.grad_mean", "N.divides", "T1.claims",
}  # fmt: skip
FIGURES, EQUATIONS = {}, {}


def figures(*row_ids, digits=4):
    """Registers a function from a row to the tree of values that the row prints to at least so many digits."""

    def add(compute):
        FIGURES.update(dict.fromkeys(row_ids, (compute, digits)))
        return compute

    return add


def equation(row_id):
    """Registers a function that gives pairs of values: ours, and the formula's that the row has in words."""

    def add(compute):
        EQUATIONS[row_id] = compute
        return compute

    return add


def check_printed(ours, printed, digits=4):
    """Compares a tree of values with printed ones: integers exactly, others to one unit of the last printed digit."""
    if isinstance(printed, Mapping):
        assert list(ours) == list(printed)
        for key in printed:
            check_printed(ours[key], printed[key], digits)
    elif isinstance(printed, list):
        assert len(ours) == len(printed)
        for our, theirs in zip(ours, printed, strict=True):
            check_printed(our, theirs, digits)
    elif isinstance(printed, str | bool | None):
        assert ours == printed, (ours, printed)
    elif isinstance(printed, int):
        assert float(ours) == printed, (ours, printed)
    else:
        mantissa = re.sub(r"e.*", "", repr(printed)).replace("-", "").replace(".", "").strip("0")
        exponent = math.floor(math.log10(abs(printed))) if printed else -9
        unit = 10.0 ** (exponent + 1 - max(len(mantissa), digits))
        assert abs(float(ours) - printed) <= unit, (ours, printed)


def test_every_row_has_one_check():
    assert {*FIGURES, *EQUATIONS, *IN_WORDS} == set(ROWS)
    assert len(FIGURES) + len(EQUATIONS) + len(IN_WORDS) == len(ROWS)


@pytest.mark.parametrize("row_id", FIGURES)
def test_the_figures_are_ours(row_id):
    compute, digits = FIGURES[row_id]
    check_printed(compute(ROWS[row_id]), ROWS[row_id]["our_value"], digits)


@pytest.mark.parametrize("row_id", EQUATIONS)
def test_the_equations_hold(row_id):
    for ours, theirs in EQUATIONS[row_id]():
        assert np.allclose(ours, theirs, rtol=1e-9, atol=0)  # rounding, of differences of sums 200 times as large


def test_what_is_printed_is_compared_to_its_last_digit():
    for ours, printed in ((24.999, 25), (99.5661, 99.565), (0.9, None), ({"a": 1}, {"b": 1}), ([1.0], [1.0, 2.0])):
        with pytest.raises(AssertionError):
            check_printed(ours, printed)
    check_printed({"a": [25.0, 99.5655, None]}, {"a": [25, 99.565, None]})


# Parameters, memory and batches ------------------------------------------------------------------------------------


def sizes_of(vocab, d_model, d_ff, layers, heads):
    return {
        "vocab": vocab, "context": 128, "width": d_model, "num_layers": layers, "num_heads": heads, "hidden": d_ff,
    }  # fmt: skip


XXL = feed_forward(width=16384, hidden=53248, num_blocks=126)
XL = transformer(**sizes_of(10_000, 768, 3200, 16, 12))
S_BYTES = 4 * XL.num_params
STATES = 16 * XXL.num_params


@figures("P.xl_seed")
def _(row):
    return {"params": XL.num_params, "bytes": S_BYTES, "MiB": S_BYTES / MIB, "tensors": len(XL.tensors)}


@figures("P.handout25", "P.handout26")
def _(row):
    return {name: sizes_in_words(*row["inputs"]["table"][name], row["inputs"]["vocab"]) for name in row["our_value"]}


def sizes_in_words(d_model, d_ff, layers, heads, vocab):
    sizes = sizes_of(vocab, d_model, d_ff, layers, heads)
    model = transformer(**sizes)
    count, embedding = model.num_params, model.unit_params[0]
    return {
        "d_model": d_model, "d_ff": d_ff, "layers": layers, "heads": heads, "head_dim": d_model // heads,
        "params": count, "non_embedding": count - 2 * embedding, "without_tok_emb": count - embedding,
        "fp32_MiB": 4 * count / MIB, "fp32_GiB": 4 * count / GIB,
        "fp32_train_state_GiB": state_bytes(count, stage=0).total / GIB, "tensors": len(model.tensors),
        "if_two_matrix_ffn": transformer(**sizes, num_matrices=2).num_params,
        "if_two_matrix_ffn_tied_gpt2_vocab": transformer(
            **{**sizes, "vocab": 50_257}, num_matrices=2, tied=True
        ).num_params,
    }  # fmt: skip


@figures("P.leaderboard26")
def _(row):
    return transformer(**sizes_of(*map(row["inputs"].get, ("vocab", "d_model", "d_ff", "layers", "heads")))).num_params


@figures("S.optim_state")
def _(row):
    sizes, each = XL.tensor_elements, row["inputs"]["state_bytes_per_param"]
    by_index = [each * sum(sizes[rank::2]) / MIB for rank in range(2)]  # tensor i belongs to rank i mod 2
    greedy = [0, 0]  # largest first, each to the rank that has least
    for size in sorted(sizes, reverse=True):
        greedy[greedy.index(min(greedy))] += size
    whole = each * XL.num_params / MIB
    return {
        "rank0_MiB": by_index[0], "rank1_MiB": by_index[1], "ratio_to_baseline": by_index[0] / whole,
        "imbalance": by_index[0] / by_index[1], "excess_over_half_MiB": by_index[0] - whole / 2,
        "baseline_MiB": whole, "best_LPT_MiB": each * max(greedy) / MIB,
    }  # fmt: skip


@figures("X.params")
def _(row):
    return feed_forward(*map(row["inputs"].get, ("d_model", "d_ff", "blocks"))).num_params


@figures("X.states")
def _(row):
    ours = state_bytes(row["inputs"]["P"], stage=0).total
    return {
        "bytes": ours, "GiB": ours / GIB, "TB": ours / 1e12, "H100_at_80e9": ours / 80e9,
        "H100_at_80GiB": ours / (80 * GIB),
    }  # fmt: skip


@figures("H26.fsdp_accounting")
def _(row):
    ranks, xl = row["inputs"]["N"], transformer(**sizes_of(10_000, 2560, 10_240, 32, 32))
    gains = sum(math.prod(shape) for name, shape in xl.tensors if name.endswith("norm"))  # not sharded
    ddp, sharded = (state_bytes(xl.num_params, stage, ranks).total / GIB for stage in (0, 1))
    fsdp = (state_bytes(xl.num_params - gains, 3, ranks).total + state_bytes(gains, 0).total) / GIB
    return {
        "ddp_GiB": ddp, "opt_sharded_GiB": sharded, "fsdp_GiB": fsdp, "saved_vs_opt_sharded_GiB": sharded - fsdp,
        "saved_vs_ddp_GiB": ddp - fsdp,
    }  # fmt: skip


@figures("Z.mem")
def _(row):
    states = dict(zip(row["our_value"], (FP32, MIXED, MIXED_ACCUMULATED), strict=True))
    return {
        name: {
            key: {ranks: state_bytes(1, stage, int(ranks.removeprefix("N")), states[name]).total for ranks in by_ranks}
            for stage, (key, by_ranks) in zip(STAGES, stages.items(), strict=True)
        }
        for name, stages in row["our_value"].items()
    }


@figures("Z.paper")
def _(row):
    return [state_bytes(row["inputs"]["Psi"], stage, row["inputs"]["N"], MIXED).total / 1e9 for stage in STAGES]


@figures("Z.mixed_sum")
def _(row):
    return [MIXED_ACCUMULATED.total, MIXED.total]


@figures("Z.70B")
def _(row):
    return state_bytes(row["inputs"]["params"], 0, 1, PerParameter(row["inputs"]["bytes"], 0, 0)).total / GIB


@figures("Z.gbs")
def _(row):
    micro, ranks, batch = row["inputs"]["mbs"], row["inputs"]["dp"], 2**22 // 2**12  # tokens over those of a sequence
    return {
        "bs": micro * (batch // (micro * ranks)) * ranks, "tokens_binary": batch * 2**12,
        "ga128": batch // (micro * 128), "ga512": batch // (micro * 512), "bs_if_decimal_4e6_over_4096": 4e6 / 4096,
    }  # fmt: skip


@figures("Z.gbs_over_dp")
def _(row):
    gbs, dp, mbs = (row["inputs"][key] for key in ("gbs", "dp", "mbs"))
    return {"gbs_over_dp": gbs / dp, "grad_acc": gbs / (mbs * dp)}


@figures("Z.examples")
def _(row):
    counts = {
        "seed XL": XL.num_params, "handout25 xl": transformer(**sizes_of(10_000, 1600, 6400, 48, 25)).num_params,
        "handout25 2.7B": transformer(**sizes_of(10_000, 2560, 10240, 32, 32)).num_params, "XXL (9)": XXL.num_params,
    }  # fmt: skip
    return {
        model: {
            ranks: {f"stage{stage}": state_bytes(counts[model], stage, int(ranks[2:])).total / GIB for stage in STAGES}
            for ranks in by_ranks
        }
        for model, by_ranks in row["our_value"].items()
    }


@figures("S1.shapes")
def _(row):
    count, ranks = row["inputs"]["params"], row["inputs"]["N"]
    ours = {name: state_bytes(count, stage, ranks).total for name, stage in (("ddp", 0), ("zero2", 2))}
    elements = {name: num_bytes / 4 for name, num_bytes in ours.items()}
    return {**row["our_value"], "per_rank_elements_fp32": elements, "per_rank_bytes": ours}


@equation("N.adam2x")
def _():
    return [(FP32.optimizer, 2 * FP32.parameter), (MIXED.optimizer, 6 * MIXED.parameter)]


# Traffic -----------------------------------------------------------------------------------------------------------


def num_gathers(num_layers, num_microbatches=1, *, keep_last=True, keep_first=False):
    """Layers that zero3 gathers in a step of A micro-batches: it may keep the last between its forward and backward,
    and the first between the backward of a micro-batch and the forward of the next."""
    batches = num_microbatches
    return 2 * batches * num_layers - batches * keep_last - (batches - 1) * keep_first


@pytest.mark.parametrize(("keep_first", "keep_last"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("num_layers", "num_microbatches"), [(1, 2), (2, 1), (3, 4)])
def test_gathers_by_brute_force(num_layers, num_microbatches, keep_first, keep_last):
    """Layers come and go as forwards and backwards need them; whatever may stay stays."""
    resident, gathered = set(), 0

    def use(layer, stays):
        nonlocal gathered
        gathered += layer not in resident
        (resident.add if stays else resident.discard)(layer)

    for batch in range(num_microbatches):
        for layer in range(num_layers):
            use(layer, keep_last and layer == num_layers - 1)
        for layer in reversed(range(num_layers)):
            use(layer, keep_first and layer == 0 and batch < num_microbatches - 1)
    assert gathered == num_gathers(num_layers, num_microbatches, keep_last=keep_last, keep_first=keep_first)


@figures("Z.63")
def _(row):
    layers = row["inputs"]["layers"]
    gathers = num_gathers(layers)
    return {
        "allgathers": gathers, "reshards": gathers, "volume_in_layer_Psi": gathers / layers,
        "plus_reduce_scatter_total": gathers / layers + traffic("zero3").gradients,
        "without_trick": num_gathers(layers, keep_last=False),
        "with_A_microbatches": row["our_value"]["with_A_microbatches"],
        "A4": [num_gathers(layers, 4, keep_first=True), num_gathers(layers, 4)],
    }  # fmt: skip


@equation("Z.comm")
def _():
    a, layers = np.arange(1, 9), 32
    words = {"2A": 2 * a, "A+1": a + 1, "2A+1": 2 * a + 1, "3A": 3 * a, "2": 2 + 0 * a, "3": 3 + 0 * a}
    names = {
        "stage0": "bucketed", "stage1": "zero1", "stage2": "zero2", "stage3": "zero3",
        "handout/blog sharded optimizer (AR + broadcast)": "sharded_optimizer",
        "stage1 with all-reduce (seed001's variant)": "sharded_optimizer",
        "stage3, parameters kept gathered over the step (no reshard)": "zero3",
    }  # fmt: skip
    yield num_gathers(layers) / layers + traffic("zero3").gradients, 3 - 1 / layers  # the last layer kept
    for key, columns in ROWS["Z.comm"]["our_value"].items():
        for column, formula in columns.items() if key in names else ():
            reduce = "once" if column.startswith("accumulate") else "every"
            is_one = column == "A=1"
            ours = traffic(names[key], 1 if is_one else a, reduce, reshard="no reshard" not in key).total
            yield ours, formula if is_one else words[formula.partition(" ")[0]]


@equation("S.zero1_diff")
def _():
    return [(traffic("sharded_optimizer").total / traffic("zero1").total, 1.5)]


@equation("Z.stage1_conflict")
def _():
    return [(traffic("zero1").total, 2), (traffic("sharded_optimizer").total, 3)]


# Compute-bound batches and splits ----------------------------------------------------------------------------------
# With X Y = N, a step of B tokens is compute-bound if, for m forwards of products and gathers and t of TP reductions,
#
#     a X + b B Y <= c B        a = m e P / W_X,  b = 2 t e A / W_Y,  c = m f / C       times added, r(n) = 1
#     a X <= c B and b Y <= c                                                         axes overlapped
#
# At given N the sum is least where its terms are equal, X* = sqrt(b B N / a), with B / N >= 4 a b / c^2 (a b / c^2
# overlapped). With r(n) = (n-1)/n, X becomes X-1 and Y becomes Y-1.

C, W = 4.6e14, 1.8e11
BOOK = DeviceRates(C, fsdp_bytes_per_s=2 * W, tp_bytes_per_s=W)
PLAIN, EXACT, EXACT_BOTH = Assumptions(), Assumptions(ring_factors=True), Assumptions("both", ring_factors=True)
OVERLAPPED = Assumptions(overlapped_axes=True)


def coefficients(model, rates, assumed):
    m, t, e = assumed.multiples.compute, assumed.multiples.tp, assumed.element_bytes
    return (
        m * e * model.num_params / rates.fsdp_bytes_per_s,
        2 * t * e * model.summed_per_token / rates.tp_bytes_per_s,
        m * model.flops_per_token / rates.flops_per_s,
    )


def most_fsdp_ranks(model, rates, tokens, assumed=PLAIN):
    a, _, c = coefficients(model, rates, assumed)
    return assumed.ring_factors + c * tokens / a


def most_tp_ranks(model, rates, assumed=PLAIN):
    _, b, c = coefficients(model, rates, assumed)
    return assumed.ring_factors + c / b


def most_ranks(model, rates, tokens, assumed):
    """The most ranks in both dimensions, not rounded."""
    a, b, c = coefficients(model, rates, assumed)
    if assumed.overlapped_axes:
        return assumed.ring_factors + c * tokens / a, assumed.ring_factors + c / b
    k = c * tokens + (a + b * tokens if assumed.ring_factors else 0)
    return k / (2 * a), k / (2 * b * tokens)


def continuous_split(model, rates, num_devices, tokens=None, assumed=PLAIN):
    """X and B of the split that communicates least; B is the smallest compute-bound batch if not given."""
    a, b, c = coefficients(model, rates, assumed)
    tokens = tokens or num_devices * a * b / c**2 * (1 if assumed.overlapped_axes else 4)
    return math.sqrt(b * tokens * num_devices / a), tokens


def kept(tokens):
    return float(activation_bytes(tokens, XXL.kept_per_token, XXL.kept_cut_per_token))


def fewest(tokens, capacity=95e9, gathered=0.0):
    """Ranks of FSDP that hold the model, with half of the activations on each of two."""
    ranks = float(least_ranks(STATES + kept(tokens) / 2, kept(tokens) / 2 + gathered, capacity))
    return int(ranks) if math.isfinite(ranks) else None


@figures("X.saved_for_backward")
def _(row):
    return {
        "bytes_per_token": kept(1), "MiB_per_token": kept(1) / MIB, "GB_at_4096_tokens": kept(4096) / 1e9,
        "GB_at_1M_tokens": kept(2**20) / 1e9, "GB_at_25302_tokens": kept(25302) / 1e9,
    }  # fmt: skip


@figures("X.h100_arith")
def _(row):
    half_gib = state_bytes(XXL.num_params, 0).total / 2 / GIB
    return {"as_written_1638_over_80": half_gib / 80, "with_GiB_to_GB": half_gib * GIB / 80e9}


@equation("X.fsdp_formula")
def _():
    n = np.arange(40, 90)
    held = (STATES + kept(4096) / 2) / n + kept(4096) / 2
    return [(kept(4096), 17_547_264 * 4096), (fewest(4096), n[held < 95e9][0])]


@figures("X.fsdp_nmin")
def _(row):
    by_tokens = row["our_value"]["N_min_by_tokens_per_device"]
    return {
        "N_min_by_tokens_per_device": {tokens: fewest(int(tokens)) for tokens in by_tokens},
        "max_tokens_per_device": 95e9 / (kept(1) / 2), "N_min_if_95GiB_and_b0": fewest(0, 95 * GIB),
        "N_min_if_96e9_and_b0": fewest(0, 96e9),
        "with_2_gathered_bf16_blocks_b0": fewest(0, gathered=gathered_bytes(XXL.unit_params, 2)),
    }  # fmt: skip


@figures("X.c_W")
def _(row):
    return cluster_of(target("v5p:64"), "bfloat16").link_gb_per_s * 1e9


@equation("X.c_mesh")
def _():
    given, cluster = ROWS["X.c_mesh"]["inputs"], cluster_of(target("v5p:64"), "bfloat16")
    axes = cluster.axes(given["X"], given["Y"])
    return [(cluster.torus, (4, 4, 4)), (axes[:2], (given["M_X"], given["M_Y"])), (given["X"] * given["Y"], 64)]


@figures("X.c_global")
def _(row):
    return {**row["our_value"], "with_blogs_own_premises": row["inputs"]["per_device"] * 16 * 2}


@figures("X.c_arith", digits=5)
def _(row):
    c, w = row["inputs"]["C"], row["inputs"]["W"]
    right = times(XXL, DeviceRates(c, w, w), 16, 16, 4, 1, EXACT_BOTH)  # a token on each of 16 FSDP ranks
    compute_s = float(right.compute_s)
    # The document's two undercounts: 2 of 3 passes, half of an all-reduce.
    fsdp_s, tp_s = float(right.fsdp_s) * 2 / 3, float(right.tp_s) / 2
    return {
        "flop_per_token": compute_s * c, "t_comp": compute_s, "fsdp_bytes": fsdp_s * w, "t_fsdp": fsdp_s, "t_tp": tp_s,
        "b": fsdp_s / (compute_s - tp_s),
    }  # fmt: skip


@figures("X.c_blog_fixed", digits=5)
def _(row):
    machines = {"W2p9e10": DeviceRates(C, 2.9e10, 2.9e10), "W1p8e11": DeviceRates(C, W, W), "W1p8e11_MX2": BOOK}
    return {name: min_tokens(XXL, machine, 16, 4, 1, EXACT_BOTH) / 16 for name, machine in machines.items()}


@figures("X.c_answer", digits=5)
def _(row):
    cases = [
        (BOOK, PLAIN), (BOOK._replace(flops_per_s=4.59e14), PLAIN), (BOOK, OVERLAPPED), (BOOK, EXACT),
        (DeviceRates(C, 2 * 9e10, 9e10), PLAIN), (DeviceRates(C, 2 * 2.9e10, 2.9e10), PLAIN),
        (DeviceRates(C, W, W), PLAIN), (BOOK, Assumptions("both")), (BOOK._replace(tp_bytes_per_s=1e30), PLAIN),
    ]  # fmt: skip
    found = {}
    for (machine, assumed), name in zip(cases, row["our_value"], strict=True):
        total = float(min_tokens(XXL, machine, row["inputs"]["X"], row["inputs"]["Y"], 1, assumed))
        each = {"B_total": total, "per_chip_B_over_N": total / 64, "per_FSDP_rank_B_over_X": total / 16}
        found[name] = each if math.isfinite(total) else None
    return found


@figures("X.c_optimum")
def _(row):
    n = row["inputs"]["N"]
    fsdp, tokens = continuous_split(XXL, BOOK, n)
    best = best_split(XXL, lambda fsdp, tp: BOOK, n)
    return {
        "B_over_N_min": tokens / n, "B_min_N64": tokens, "X_opt": fsdp,
        "best_power_of_two": {"X": best.fsdp, "Y": best.tp, "B": best.tokens, "per_chip": best.tokens / n},
        "overlapped_axes_B_over_N_min": continuous_split(XXL, BOOK, n, assumed=OVERLAPPED)[1] / n,
        "max_Y_no_limit": most_tp_ranks(XXL, BOOK),
        "max_Y_at_2p9e10": most_tp_ranks(XXL, DeviceRates(C, 2.9e10, 2.9e10)),
    }  # fmt: skip


def book_model(hidden):
    """A block, and the book's device with alpha = 2550 on three axes, two of them for FSDP."""
    return feed_forward(width=4096, hidden=hidden), DeviceRates(2550 * W, 2 * W, W)


@figures("X.book_slip")
def _(row):
    assert continuous_split(*book_model(row["inputs"]["F"]), 64, 48_000)[0] == pytest.approx(13.69, abs=0.01)
    return continuous_split(*book_model(row["inputs"]["F"]), row["inputs"]["N"])[1]


@figures("X.book_2550")
def _(row):
    cluster = cluster_of(target("v5p:64"), "bfloat16")
    return cluster.flops_per_s / (cluster.link_gb_per_s * 1e9)


@figures("X.book_400")
def _(row):
    return continuous_split(*book_model(32768), 1)[1]


@figures("X.book_dsv2", "X.book_llama")
def _(row):
    tokens = 40e6 if row["id"] == "X.book_dsv2" else 16e6
    return most_fsdp_ranks(book_model(32768)[0], DeviceRates(2550 * W, 3 * W, W), tokens)  # FSDP over all three axes


# The handout of 2026: three matrices, one egress rate, exact ring bytes. Any sizes work, since D cancels.

B, D, F = 300_000.0, 5120.0, 17_000.0
GATED = feed_forward(width=int(D), hidden=int(F), num_matrices=3)
HC, HW = 989.4e12, 450e9
H100 = DeviceRates(HC, HW, HW)
FORWARD, BACKWARD = (Assumptions(passes, ring_factors=True) for passes in ("forward", "backward"))
BOTH_PASSES = ((FORWARD, 1), (BACKWARD, 2))
N = np.array([2.0, 8.0, 64.0])
EQUATIONS |= {
    "H26.dp_a": lambda: [(times(GATED, H100, B, 1, 1, N, BACKWARD).compute_s, 12 * B * D * F / N / HC)],
    "H26.dp_b": lambda: [(times(GATED, H100, B, 1, 1, N, BACKWARD).dp_s, 12 * (N - 1) / N * D * F / HW)],
    "H26.dp_c": lambda: [
        (most_fsdp_ranks(GATED, H100, B, BACKWARD), 1 + B * HW / HC),
        (min_tokens(GATED, H100, 1, 1, 1 + B * HW / HC, BACKWARD), B),
    ],
    "H26.fsdp_a": lambda: [
        (times(GATED, H100, B, N, 1, 1, each).compute_s, 6 * count * B * D * F / N / HC) for each, count in BOTH_PASSES
    ],
    "H26.fsdp_b": lambda: [
        (times(GATED, H100, B, N, 1, 1, each).fsdp_s, 6 * count * (N - 1) / N * D * F / HW)
        for each, count in BOTH_PASSES
    ],
    "H26.fsdp_c": lambda: [(most_fsdp_ranks(GATED, H100, B, each), 1 + B * HW / HC) for each, _ in BOTH_PASSES],
    "H26.tp_b": lambda: [
        (times(GATED, H100, B, 1, N, 1, each).compute_s, 6 * count * B * D * F / N / HC) for each, count in BOTH_PASSES
    ],
    "H26.tp_c": lambda: [
        (times(GATED, H100, B, 1, N, 1, each).tp_s, 4 * (N - 1) / N * B * D / HW) for each, _ in BOTH_PASSES
    ],
    "H26.tp_d": lambda: [
        (most_tp_ranks(GATED, H100, each), 1 + 1.5 * count * F * HW / HC) for each, count in BOTH_PASSES
    ],
    "H26.2d_a": lambda: [(times(GATED, H100, B, 8, N, 1, FORWARD).compute_s, 6 * B * D * F / (8 * N) / HC)],
}


@equation("H26.2d_b")
def _():
    overlapped = replace(FORWARD, overlapped_axes=True)
    for tp in (2, 8, 64):
        theirs = 6 * D * F / tp * (N - 1) / (N * HW), 4 * B * D / N * (tp - 1) / (tp * HW)
        yield times(GATED, H100, B, N, tp, 1, overlapped).communication_s(overlapped), np.maximum(*theirs)


@equation("H26.2d_c")
def _():
    fsdp, tp = most_ranks(GATED, H100, B, replace(FORWARD, overlapped_axes=True))
    return [(fsdp * tp, (1 + B * HW / HC) * (1 + 1.5 * F * HW / HC))]


@equation("H26.2d_d")
def _():
    k = 3 * B * F * HW / HC + 3 * F + 2 * B
    fsdp, tp = most_ranks(GATED, H100, B, FORWARD)
    return [((fsdp, tp, fsdp * tp), (k / (6 * F), k / (4 * B), k**2 / (24 * B * F)))]


# Collectives: a message of m bytes takes a + m b, and reducing it m g more -----------------------------------------

RANKS = np.array([2, 4, 8, 64])
ALPHA, BETA, GAMMA, SIZE = 3e-6, 1 / 7e9, 1 / 2e11, 1e8


def seconds(name, size, n, a, b, g):
    """Seconds of a collective of S bytes over N ranks."""
    log, share = np.log2(n), (n - 1) / n * size
    return {
        "ring_rs": (n - 1) * a + share * (b + g),
        "ring_ag": (n - 1) * a + share * b,
        "ring_ar": 2 * (n - 1) * a + 2 * share * b + share * g,
        "alt_ring": (n - 1) * a + (n - 1) * size * (b + g),
        "ar_root": 2 * (n - 1) * (a + size * b) + (n - 1) * size * g,
        "recdbl": log * (a + size * b + size * g),
        "rabenseifner": 2 * log * a + 2 * share * b + share * g,
        "tree_ar": 2 * log * a + 2 * size * b,
        "bcast_tree": np.ceil(log) * (a + size * b),
    }[name]


@equation("C.ring_ar")
def _():
    """Every rank passes a chunk to the next, N-1 times adding it and N-1 times copying it."""
    for n in range(2, 12):
        buffers = np.arange(n)[:, None] ** 2 + np.arange(n)
        total, elapsed = buffers.sum(axis=0), 0.0
        for step in range(2 * (n - 1)):
            chunks = [(rank - step) % n for rank in range(n)]
            sent = [buffers[rank, chunk] for rank, chunk in enumerate(chunks)]
            for rank, chunk in enumerate(chunks):
                receiver = (rank + 1) % n
                buffers[receiver, chunk] = sent[rank] + (step < n - 1) * buffers[receiver, chunk]
            elapsed += ALPHA + SIZE / n * (BETA + GAMMA * (step < n - 1))
        yield buffers, np.tile(total, (n, 1))
        yield seconds("ring_ar", SIZE, n, ALPHA, BETA, GAMMA), elapsed


@equation("C.ring_rs_ag")
def _():
    for half in ("ring_rs", "ring_ag"):
        yield seconds("ring_ar", SIZE, RANKS, ALPHA, BETA, 0), 2 * seconds(half, SIZE, RANKS, ALPHA, BETA, 0)


@equation("C.ar_equiv")
def _():
    tree, ring = (seconds(name, SIZE, RANKS, 0, BETA, 0) for name in ("tree_ar", "ring_ar"))
    return [(tree / ring, RANKS / (RANKS - 1))]


@equation("C.alt_ring")
def _():
    ours = seconds("alt_ring", SIZE, RANKS, 0, BETA, 0)
    return [(ours, (RANKS - 1) * SIZE * BETA), (ours / seconds("ring_ar", SIZE, RANKS, 0, BETA, 0), RANKS / 2)]


@equation("C.busbw")
def _():
    names = {"all_reduce": "all-reduce", "alltoall": "all-to-all", "sendrecv": "collective-permute"}
    same = {"gather": "all-gather", "scatter": "reduce-scatter", "hypercube": "broadcast"}  # the same factors
    for kind, printed in ROWS["C.busbw"]["our_value"].items():
        for key, factor in printed.items():
            if key != "S":
                ours = bus_factor((names | same).get(kind, kind.replace("_", "-")), int(key.removeprefix("factor_n")))
                yield round(ours, 5), round(factor, 5)


@figures("T1.allreduce", digits=3)
def _(row):
    sweeps = {}
    for point in row["document_value"]:
        sweeps.setdefault((point["backend"], point["world_size"]), []).append(point)
        check_printed(point["size_bytes"] / point["mean_ms"] / 1e6, point["algbw_GBps"])
        check_printed(point["algbw_GBps"] * bus_factor("all-reduce", point["world_size"]), point["busbw_GBps"])
    fits = {f"{backend}{ranks}": fit_in_words(points, ranks) for (backend, ranks), points in sweeps.items()}
    ratios = {}
    for ranks in row["our_value"]["nccl_over_gloo_speedup"]:
        gloo, nccl = ([point["mean_ms"] for point in sweeps[backend, int(ranks)]] for backend in ("gloo", "nccl"))
        ratios[ranks] = list(np.divide(gloo, nccl))
    return {**row["our_value"], "fits": fits, "nccl_over_gloo_speedup": ratios}


def fit_in_words(points, ranks):
    sizes, measured_s = [point["size_bytes"] for point in points], [point["mean_ms"] * 1e-3 for point in points]
    fit, small, large = (fit_sweep(sizes[part], measured_s[part]) for part in (slice(4), slice(2), slice(2, 4)))
    return {
        "o_ms": fit.latency_s * 1e3, "w_GBps": fit.bytes_per_s / 1e9, "o_ms_from_1_10MiB": small.latency_s * 1e3,
        "o_ms_1MiB_minus_largeslope": (measured_s[0] - sizes[0] / large.bytes_per_s) * 1e3,
        "w_GBps_from_100MiB_1GiB": large.bytes_per_s / 1e9,
        "bus_GBps": fit.bytes_per_s / 1e9 * bus_factor("all-reduce", ranks),
        "alpha_us_if_ring": fit.latency_s / (2 * (ranks - 1)) * 1e6, "rel_resid": list(fit.residuals),
    }  # fmt: skip


@figures("C.alpha_beta")
def _(row):
    size, n, a, b = 684_395_520, 8, 1e-5, 1 / 4e9
    best = math.sqrt((n - 2) * size * b / a)  # chunks of a broadcast down a chain
    chain_s = min((n - 2 + k) * (a + size * b / k) for k in (math.floor(best), math.ceil(best)))
    (key,) = (key for key in row["our_value"] if key.startswith("example"))
    ours = {
        name: chain_s * 1e3 if name == "bcast_ring_kopt" else best if name == "k_opt"
        else seconds(name, size, n, a, b, 0) * 1e3 for name in row["our_value"][key]
    }  # fmt: skip
    return {**row["our_value"], key: ours}


# Buckets -----------------------------------------------------------------------------------------------------------


def backward_specs(tensors):
    """A model's gradients in reversed forward order."""
    return [TensorSpec(name, shape, "float32") for name, shape in reversed(tensors)]


def norms_last(tensors):
    """Moves each block's norms after its matrices, like a module that registers them last."""
    blocks = [tensors[start : start + 9] for start in range(1, len(tensors) - 2, 9)]
    moved = [entry for block in blocks for entry in sorted(block, key=lambda entry: "_norm" in entry[0])]
    return (tensors[0], *moved, *tensors[-2:])


def special(num_bytes, bytes_per_s, latency_s):
    """The optimum of the special case C = s/w."""
    return uniform_optimum(num_bytes / bytes_per_s, num_bytes, bytes_per_s, latency_s)


def special_tail_s(num_bytes, num_buckets, bytes_per_s, latency_s):
    """T(n) = s/(n w) + n o."""
    return float(uniform_tail_s(num_bytes / bytes_per_s, num_bytes, num_buckets, bytes_per_s, latency_s))


@equation("B.overhead")
def _():
    s, w, o = 1e9, 4e9, 1e-4
    for n in (1, 7, 130):
        c = s / (n * w)
        send = [c + o] * n
        simulated = finish_s(np.cumsum([c] * n), send) - n * c
        yield (simulated, special_tail_s(s, n, w, o)), s / (n * w) + n * o
        # If compute takes as long as sending with its latency, only the last bucket is exposed.
        yield finish_s(np.cumsum([c + o] * n), send) - n * (c + o), s / (n * w) + o


@equation("B.optimum")
def _():
    s, w, o = 684e6, 4e9, 9e-5
    return [(special(s, w, o)[:3], (math.sqrt(s / (w * o)), math.sqrt(s * w * o), 2 * math.sqrt(s * o / w)))]


@equation("B.general")
def _():
    w, o, n, c = 4e9, 1e-4, 40, 0.1
    for s in (2e8, 1e9):
        yield uniform_tail_s(c, s, n, w, o), max(c / n + s / w + n * o - c, s / (n * w) + o)
        yield uniform_optimum(c, s, w, o).num_buckets, max(math.sqrt(c / o), (c - s / w) / o)


@figures("B.bucket_counts")
def _(row):
    orders = {"attn_ffn_ln": norms_last(XL.tensors), "ln_attn_ln_ffn": XL.tensors}
    found = {}
    for key in row["our_value"]:
        order, _, cap = key.partition("@")
        specs = backward_specs(orders[order])
        ours, torch = (
            plan_buckets(specs, float(cap)).buckets,
            plan_buckets(specs, [1.0, float(cap)], rule="torch").buckets,
        )
        found[key] = {
            "n_blog": len(ours), "largest_MiB": max(bucket.num_bytes for bucket in ours) / MIB,
            "last_MiB": ours[-1].num_bytes / MIB, "n_pytorch": len(torch),
            "pytorch_largest_MiB": max(bucket.num_bytes for bucket in torch) / MIB,
            "pytorch_last_MiB": torch[-1].num_bytes / MIB,
        }  # fmt: skip
    return found


@figures("B.fit_predict")
def _(row):
    s, o, w = row["inputs"]["s_bytes"], row["inputs"]["o_ms"] * 1e-3, row["inputs"]["w_GBps"] * 1e9
    backward_s, slow_s = 59.17e-3, 0.25e-3  # the first of B.fit_simulated
    best, real = special(s, w, o), uniform_optimum(backward_s, s, w, o)
    return {
        "n_star": best.num_buckets, "b_star_MB": best.bucket_bytes / 1e6, "b_star_MiB": best.bucket_bytes / MIB,
        "T_star_ms": best.tail_s * 1e3, "commbound_n_star": real.num_buckets,
        "commbound_b_star_MiB": real.bucket_bytes / MIB,
        "b_star_MiB_if_o_0p25ms": special(s, w, slow_s).bucket_bytes / MIB,
        "commbound_b_star_MiB_if_o_0p25ms": uniform_optimum(backward_s, s, w, slow_s).bucket_bytes / MIB,
    }  # fmt: skip


@figures("B.fit_simulated")
def _(row):
    backward_s, rate = row["inputs"]["C_bwd_ms"] * 1e-3, S_BYTES / (row["inputs"]["s_over_w_ms"] * 1e-3)
    measured = {point["variant"]: point["step_ms"] for point in row["document_value"]}
    specs = backward_specs(norms_last(XL.tensors))
    sizes = [spec.num_bytes for spec in specs]
    ready_s = np.cumsum(sizes) / sum(sizes) * backward_s
    place = {spec.name: index for index, spec in enumerate(specs)}

    def tail_ms(plan, latency_s):
        buckets = [[place[tensor.name] for tensor in bucket.tensors] for bucket in plan.buckets]
        return (float(finish_s(*bucket_times_s(buckets, sizes, ready_s, rate, latency_s))) - backward_s) * 1e3

    latencies = {"o_fit": 0.08995e-3, "o=0.25ms": 0.25e-3}
    # One bucket starts when the backward ends, so its tail is all of its communication.
    alone_ms = measured["bucketed_1000mb"] - tail_ms(plan_buckets(specs, 1000), latencies["o_fit"])
    # Without buckets nothing is copied; the measured wait and division come on top of compute.
    waits = {each["variant"]: each["comm_mean_ms"] for each in ROWS["T3.buckets"]["document_value"]}
    unbucketed_ms = row["inputs"]["compute_only_mbs8_ms"] + waits["overlap"]
    found = {}
    for name, printed in row["our_value"].items():
        is_bucketed = name.startswith("bucketed")
        plan = plan_buckets(specs, float(name.removeprefix("bucketed_").removesuffix("mb")) if is_bucketed else 1e-9)
        step_ms = measured[name.partition("(")[0]]
        tails = {key: tail_ms(plan, latency_s) for key, latency_s in latencies.items()}
        base_ms = alone_ms if is_bucketed else unbucketed_ms
        ours = {
            key: {"n_b": len(plan.buckets), "tail_ms": tail, "step_ms": tail + base_ms}
            for key, tail in tails.items()
        } | {
            "measured_step_ms": step_ms, "measured_exposed_ms": step_ms - alone_ms,
            "handout_model_tail_ms_o_fit": special_tail_s(S_BYTES, len(plan.buckets), rate, latencies["o_fit"]) * 1e3,
        }  # fmt: skip
        found[name] = {key: ours.get(key, value) for key, value in printed.items()}
    return found


@figures("B.percall_from_naive_flat")
def _(row):
    given = row["inputs"]
    pass_ms = 2 * S_BYTES / (given["mem_bw_GBps"] * 1e9) * 1e3  # read and written
    saved_ms, more = given["naive_ms"] - given["flat_ms"], given["calls"] - 1
    return {
        "lower_o_ms": saved_ms / more, "with_copies_o_ms": (saved_ms + 2 * pass_ms) / more,
        "s_over_w_predicted_ms": special_tail_s(S_BYTES, 1, 4.0056e9, 0.0) * 1e3,
        "flat_minus_3_passes_ms": given["flat_ms"] - 3 * pass_ms,
    }  # fmt: skip


@equation("S1.buckets")
def _():
    printed = ROWS["S1.buckets"]["our_value"]
    layers = [("layer1.weight", 200), ("layer1.bias", 20), ("layer2.weight", 100), ("layer2.bias", 5)]
    specs = [TensorSpec(name, (count,), "float32") for name, count in reversed(layers)]
    count = sum(spec.num_elements for spec in specs)
    yield [count, 4 * count], [printed["params"], printed["bytes"]]
    yield len(plan_buckets(specs, 25).buckets), printed["buckets_at_25MiB"]
    cuts = [[len(bucket.tensors) for bucket in plan_buckets(specs, cap / MIB).buckets] for cap in range(1, 1301)]
    yield [2, 2] in cuts, False  # no cap gives layer 2, then layer 1


@equation("S1.rs_shape")
def _():
    row = ROWS["S1.rs_shape"]
    for numel, printed in row["our_value"].items():
        count, ranks = int(numel), row["inputs"]["N"]
        chunk = chunk_elements(count, ranks)
        yield [chunk, count - chunk, count // ranks], [*printed["chunks"], printed["partition"]]
        yield ranks * chunk == count, printed["ok"]


@equation("S3.bucket_elems")
def _():
    row = ROWS["S3.bucket_elems"]
    for key, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        for extra in (0, 1):
            halves = [TensorSpec("a", (row["our_value"][key] + extra - 1,), dtype), TensorSpec("b", (1,), dtype)]
            yield len(plan_buckets(halves, row["inputs"]["cap_MB"]).buckets), 1 + extra


@figures("S4.model")
def _(row):
    shapes = {"fc2.bias": (10,), "fc2.weight": (10, 1024), "fc1.bias": (1024,), "fc1.weight": (1024, 512)}
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    return {
        "params": sum(spec.num_elements for spec in specs), "MiB": sum(spec.num_bytes for spec in specs) / MIB,
        "buckets_pytorch_order": len(plan_buckets(specs, [1, 25], rule="torch").buckets),
        "buckets_blog_rule": len(plan_buckets(specs, 25).buckets),
    }  # fmt: skip


# The documents' own measurements, and the differences between them ------------------------------------------------


@figures("T2.strategies", digits=3)
def _(row):
    by_name = {each["variant"]: (each["step_mean_ms"], each["comm_mean_ms"]) for each in row["document_value"]}
    compute_ms = float(np.mean([step - comm for name, (step, comm) in by_name.items() if name != "overlap"]))
    naive_ms, _ = by_name["per_param"]
    return {
        name: {
            "step_ms": step, "saved_ms": naive_ms - step, "saved_pct": 100 * (1 - step / naive_ms),
            "speedup": naive_ms / step, "reported_comm_pct": 100 * comm / step, "true_exposed_ms": step - compute_ms,
            "true_exposed_pct": 100 * (step - compute_ms) / step,
        }
        for name, (step, comm) in ((name, by_name[name]) for name in row["our_value"])
    }  # fmt: skip


@figures("T2.exposed", digits=3)
def _(row):
    given = row["inputs"]
    exposed_ms = given["overlap_step_ms"] - given["compute_only_ms"]
    hidden_ms = given["comm_sync_ms"] - exposed_ms
    return {
        "exposed_ms": exposed_ms, "exposed_pct": 100 * exposed_ms / given["overlap_step_ms"], "hidden_ms": hidden_ms,
        "hidden_fraction": hidden_ms / given["comm_sync_ms"],
    }  # fmt: skip


@figures("T2.comm_fraction")
def _(row):
    return 100 * row["inputs"]["comm"] / row["inputs"]["step"]  # a synchronous run exposes all of its communication


@figures("T3.buckets", digits=3)
def _(row):
    steps = {each["variant"]: (each["step_mean_ms"], each["step_std_ms"]) for each in row["document_value"]}
    base_ms, one_bucket_ms = (steps[name][0] for name in ("overlap", "bucketed_1000mb"))
    return {
        name: {
            "step_ms": step, "vs_overlap_ms": step - base_ms, "vs_overlap_pct": 100 * (step / base_ms - 1),
            "se_ms": std / row["inputs"]["steps"] ** 0.5, "saved_vs_1000mb_ms": one_bucket_ms - step,
        }
        for name, (step, std) in ((name, steps[name]) for name in row["our_value"])
    }  # fmt: skip


@figures("S.peaks")
def _(row):
    baseline, sharded = row["inputs"]["table"]
    excess = {name: sharded[f"peak_{name}_mb"] - baseline[f"peak_{name}_mb"]
              for name in ("after_init", "before_step", "after_step")}  # fmt: skip
    excess["after_step_plus_saving"] = excess["after_step"] + baseline["optim_state_mb"] - sharded["optim_state_mb"]
    state = state_bytes(XL.num_params, stage=0)
    copies = (state.parameters + state.gradients) / MIB
    corrected = sharded["peak_after_step_mb"] - copies
    return {
        "sharded_minus_baseline_MiB": excess, "two_model_copies_MiB": copies,
        "leftover_after_1305_MiB": {
            "after_init": excess["after_init"] - copies, "before_step": excess["before_step"] - copies,
            "after_step": excess["after_step_plus_saving"] - copies,
        },
        "corrected_sharded_peak_after_step_MiB": corrected,
        "corrected_vs_baseline_pct": 100 * (corrected / baseline["peak_after_step_mb"] - 1),
    }  # fmt: skip


@figures("S.baseline_after_step", digits=2)
def _(row):
    state_mib = state_bytes(XL.num_params, stage=0).total / MIB
    residual = row["inputs"]["peak_MiB"] - state_mib
    logits, largest = 4 * 16 * 128 * 10_000 / MIB, 4 * max(XL.tensor_elements) / MIB
    workspace, buffers = 8.125, 2015.8 / 1024  # the matrix library's, and S.init_residual
    return {
        "states_MiB": state_mib, "residual_MiB": residual, "logits_MiB": logits, "largest_tensor_MiB": largest,
        "unexplained_after_logits_2tmp_ws_buffers": residual - logits - 2 * largest - workspace - buffers,
    }  # fmt: skip


@figures("S.init_residual")
def _(row):
    return {"residual_KiB": (row["inputs"]["peak_MiB"] - S_BYTES / MIB) * 1024}


@figures("S.time", digits=2)
def _(row):
    before, after = (each["step_mean_ms"] for each in row["inputs"]["table"])
    half_ms = 89.53 / 2  # sharding halves the optimizer's pass over its state, 89.53 ms of a step in B.fit_simulated
    return {
        "delta_ms": after - before, "pct": 100 * (after / before - 1),
        "bcast_ms_at_allreduce_busbw": S_BYTES / 4.0056e9 * 1e3, "adam_half_ms_est": half_ms,
        "implied_bcast_ms": after - before + half_ms,
        "implied_bcast_GBps": S_BYTES / (after - before + half_ms) / 1e6,
        "implied_bcast_GBps_upper": S_BYTES / (after - before) / 1e6,
    }  # fmt: skip
