"""Rows on compute-bound batches, splits and the memory of the 220-billion-parameter model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...chips import target
from ...machine import cluster_of
from ..memory import activation_bytes, gathered_bytes, least_ranks, state_bytes
from ..scaling import Assumptions, DeviceRates, best_split, min_tokens, times
from ..workload import Workload, feed_forward
from . import Row, check_printed, checks, close
from .closed_forms import continuous_split, most_fsdp_ranks, most_tp_ranks

XXL = feed_forward(width=16384, hidden=53248, num_blocks=126)
C, W = 4.6e14, 1.8e11
BOOK = DeviceRates(C, fsdp_bytes_per_s=2 * W, tp_bytes_per_s=W)
EXACT = Assumptions(ring_factors=True)
EXACT_BOTH = Assumptions(passes="both", ring_factors=True)
STATES = 3_517_578_215_424


@checks("X.saved_for_backward")
def _(row: Row) -> None:
    def kept(tokens: float) -> float:
        return float(activation_bytes(tokens, XXL.kept_per_token, XXL.kept_cut_per_token))

    ours = {
        "bytes_per_token": kept(1),
        "MiB_per_token": kept(1) / 2**20,
        "GB_at_4096_tokens": kept(4096) / 1e9,
        "GB_at_1M_tokens": kept(2**20) / 1e9,
        "GB_at_25302_tokens": kept(25302) / 1e9,
    }
    check_printed(ours, row["our_value"])


@checks("X.h100_arith")
def _(row: Row) -> None:
    half_gib = state_bytes(XXL.num_params, 0).total / 2 / 2**30
    assert half_gib == row["inputs"]["GiB"]
    check_printed(
        {"as_written_1638_over_80": half_gib / 80, "with_GiB_to_GB": half_gib * 2**30 / 80e9}, row["our_value"]
    )


@checks("X.fsdp_formula")
def _(row: Row) -> None:
    tokens, n = 4096, np.arange(40, 90)
    kept = activation_bytes(tokens, XXL.kept_per_token, XXL.kept_cut_per_token)
    held = (STATES + kept / 2) / n + kept / 2
    assert least_ranks(STATES + kept / 2, kept / 2, 95e9) == n[held < 95e9][0]
    assert kept == 17_547_264 * tokens and "17,547,264*b bytes" in row["our_value"]


@checks("X.fsdp_nmin")
def _(row: Row) -> None:
    def fewest(tokens: float, capacity: float = 95e9, gathered: float = 0.0) -> int | None:
        kept = activation_bytes(tokens, XXL.kept_per_token, XXL.kept_cut_per_token)
        ranks = float(least_ranks(row["inputs"]["states"] + kept / 2, kept / 2 + gathered, capacity))
        return int(ranks) if math.isfinite(ranks) else None

    printed = row["our_value"]
    ours = {
        "N_min_by_tokens_per_device": {tokens: fewest(int(tokens)) for tokens in printed["N_min_by_tokens_per_device"]},
        "max_tokens_per_device": 95e9 / (activation_bytes(1, XXL.kept_per_token, XXL.kept_cut_per_token) / 2),
        "N_min_if_95GiB_and_b0": fewest(0, 95 * 2**30),
        "N_min_if_96e9_and_b0": fewest(0, 96e9),
        "with_2_gathered_bf16_blocks_b0": fewest(0, gathered=gathered_bytes(XXL.unit_params, 2)),
    }
    check_printed(ours, printed)


@checks("X.c_W")
def _(row: Row) -> None:
    assert cluster_of(target("v5p:64"), "bfloat16").link_gb_per_s * 1e9 == row["our_value"]


@checks("X.c_mesh")
def _(row: Row) -> None:
    cluster = cluster_of(target("v5p:64"), "bfloat16")
    given = row["inputs"]
    assert cluster.torus == (4, 4, 4)
    assert cluster.axes(given["X"], given["Y"]) == (given["M_X"], given["M_Y"], 1, True)
    assert cluster.num_devices == given["X"] * given["Y"] and "64 chips" in row["our_value"]


@checks("X.c_global")
def _(row: Row) -> None:
    per_group, fsdp, replicas = row["inputs"]["per_device"], 16, 2
    check_printed(per_group * fsdp * replicas, row["our_value"]["with_blogs_own_premises"])


@checks("X.c_arith")
def _(row: Row) -> None:
    machine = DeviceRates(row["inputs"]["C"], row["inputs"]["W"], row["inputs"]["W"])
    tokens = 16  # one on each of 16 FSDP ranks
    right = times(XXL, machine, tokens, 16, 4, 1, EXACT_BOTH)
    compute_s = float(right.compute_s)
    # The document's two undercounts: 2 of 3 passes, half of an all-reduce.
    fsdp_s, tp_s = float(right.fsdp_s) * 2 / 3, float(right.tp_s) / 2
    ours = {
        "flop_per_token": compute_s * machine.flops_per_s,
        "t_comp": compute_s,
        "fsdp_bytes": fsdp_s * row["inputs"]["W"],
        "t_fsdp": fsdp_s,
        "t_tp": tp_s,
        "b": fsdp_s / (compute_s - tp_s),
    }
    check_printed(ours, row["our_value"], 5)


@checks("X.c_blog_fixed")
def _(row: Row) -> None:
    machines = {
        "W2p9e10": DeviceRates(C, 2.9e10, 2.9e10), "W1p8e11": DeviceRates(C, W, W), "W1p8e11_MX2": BOOK,
    }  # fmt: skip
    ours = {name: min_tokens(XXL, machine, 16, 4, 1, EXACT_BOTH) / 16 for name, machine in machines.items()}
    check_printed(ours, row["our_value"], 5)


@checks("X.c_answer")
def _(row: Row) -> None:
    given = row["inputs"]
    book = DeviceRates(given["C"], given["M_X"] * given["W"], given["M_Y"] * given["W"])
    assert book == BOOK and math.isclose(given["alpha"], C / W, rel_tol=1e-5)  # printed with 6 digits
    plain = Assumptions()
    cases = [
        (book, plain),
        (replace(book, flops_per_s=4.59e14), plain),
        (book, Assumptions(overlapped_axes=True)),
        (book, EXACT),
        (DeviceRates(C, 2 * 9e10, 9e10), plain),
        (DeviceRates(C, 2 * 2.9e10, 2.9e10), plain),
        (DeviceRates(C, W, W), plain),
        (book, Assumptions(passes="both")),
        (replace(book, tp_bytes_per_s=1e30), plain),
    ]
    for (machine, assumptions), (name, printed) in zip(cases, row["our_value"].items(), strict=True):
        total = float(min_tokens(XXL, machine, given["X"], given["Y"], 1, assumptions))
        ours = {"B_total": total, "per_chip_B_over_N": total / 64, "per_FSDP_rank_B_over_X": total / 16}
        check_printed(ours if math.isfinite(total) else None, printed, 5)
        narrow_block = feed_forward(given["D"] // 2, given["F"])  # D and L cancel
        assert close(total, min_tokens(narrow_block, machine, given["X"], given["Y"], 1, assumptions)), name


@checks("X.c_optimum")
def _(row: Row) -> None:
    n = row["inputs"]["N"]
    at_best = continuous_split(XXL, BOOK, n)
    overlapped = continuous_split(XXL, BOOK, n, assumptions=Assumptions(overlapped_axes=True))
    best = best_split(XXL, lambda fsdp, tp: BOOK, n)
    ours = {
        "B_over_N_min": at_best.tokens / n,
        "B_min_N64": at_best.tokens,
        "X_opt": at_best.fsdp,
        "best_power_of_two": {"X": best.fsdp, "Y": best.tp, "B": best.tokens, "per_chip": best.tokens / n},
        "overlapped_axes_B_over_N_min": overlapped.tokens / n,
        "max_Y_no_limit": most_tp_ranks(XXL, BOOK),
        "max_Y_at_2p9e10": most_tp_ranks(XXL, DeviceRates(C, 2.9e10, 2.9e10)),
    }
    check_printed(ours, row["our_value"])


def book_model(hidden: int) -> tuple[Workload, DeviceRates]:
    """A block, and the book's device with alpha = 2550 on three axes, two of them for FSDP."""
    return feed_forward(width=4096, hidden=hidden), DeviceRates(2550 * W, 2 * W, W)


@checks("X.book_slip")
def _(row: Row) -> None:
    model, machine = book_model(row["inputs"]["F"])
    check_printed(continuous_split(model, machine, row["inputs"]["N"]).tokens, row["our_value"])
    assert "13.69" in row["note"]
    check_printed(continuous_split(model, machine, 64, 48_000).fsdp, 13.69)


@checks("X.book_2550")
def _(row: Row) -> None:
    cluster = cluster_of(target("v5p:64"), "bfloat16")
    check_printed(cluster.flops_per_s / (cluster.link_gb_per_s * 1e9), row["our_value"])


@checks("X.book_400")
def _(row: Row) -> None:
    check_printed(continuous_split(*book_model(32768), 1).tokens, row["our_value"])


@checks("X.book_dsv2")
@checks("X.book_llama")
def _(row: Row) -> None:
    tokens = 40e6 if row["id"] == "X.book_dsv2" else 16e6
    machine = DeviceRates(2550 * W, 3 * W, W)  # FSDP alone, over all three axes
    check_printed(most_fsdp_ranks(book_model(32768)[0], machine, tokens), row["our_value"])
