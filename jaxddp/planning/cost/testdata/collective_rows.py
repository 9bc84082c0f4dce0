"""Rows on collectives: alpha-beta costs, bus factors, measured sweeps."""

from __future__ import annotations

import math

import numpy as np

from ..bandwidth import bandwidths, bus_factor, counted_bytes, fit_sweep
from ..collective import (
    Link,
    alternate_ring_all_reduce,
    best_num_chunks,
    chain_broadcast,
    flat_broadcast,
    halving_doubling_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    root_all_reduce,
    scatter_gather_broadcast,
    tree_all_reduce,
    tree_broadcast,
)
from . import Row, check_printed, checks, close

RANKS = np.array([2, 4, 8, 64])
LINK = Link(latency_s=3e-6, bytes_per_s=7e9, reduce_bytes_per_s=2e11)
S = 1e8


@checks("C.ring_ar")
def _(row: Row) -> None:
    n, link = RANKS, Link(3e-6, 7e9)
    assert close(ring_all_reduce(S, n, link).seconds, 2 * (n - 1) * 3e-6 + 2 * (n - 1) / n * S / 7e9)
    assert row["our_value"].startswith("2(N-1) steps")


@checks("C.ring_rs_ag")
def _(row: Row) -> None:
    link = Link(3e-6, 7e9)
    whole = ring_all_reduce(S, RANKS, link)
    for half in (ring_reduce_scatter(S, RANKS, link), ring_all_gather(S, RANKS, link)):
        assert close(whole.seconds / half.seconds, 2) and close(whole.sent_bytes / half.sent_bytes, 2)
    assert "exactly 2" in row["our_value"]


@checks("C.ar_equiv")
def _(row: Row) -> None:
    gap = tree_all_reduce(S, RANKS, LINK).sent_bytes / ring_all_reduce(S, RANKS, LINK).sent_bytes
    assert close(gap, RANKS / (RANKS - 1)) and "gap N/(N-1) (2x at N=2, 1.14x at N=8)" in row["our_value"]


@checks("C.alt_ring")
def _(row: Row) -> None:
    link = Link(0.0, 7e9)
    ours = alternate_ring_all_reduce(S, RANKS, link)
    assert close(ours.seconds, (RANKS - 1) * S / 7e9)
    assert close(ours.seconds / ring_all_reduce(S, RANKS, link).seconds, RANKS / 2)
    assert "N/2 x the ring" in row["our_value"]


@checks("C.busbw")
def _(row: Row) -> None:
    for kind, printed in row["our_value"].items():
        for key, factor in printed.items():
            if key != "S":
                check_printed(bus_factor(kind, int(key.removeprefix("factor_n"))), factor, 6)
        times = {"*n": 6, "*(n-1)": 5}.get(next((end for end in ("*n", "*(n-1)") if printed["S"].endswith(end)), ""), 1)
        assert counted_bytes(kind, 1000, 6) == 1000 * times


@checks("T1.allreduce")
def _(row: Row) -> None:
    sweeps: dict[tuple[str, int], list[Row]] = {}
    for point in row["document_value"]:
        sweeps.setdefault((point["backend"], point["world_size"]), []).append(point)
        ranks, printed = point["world_size"], point["algbw_GBps"]
        check_printed(bandwidths("all_reduce", point["size_bytes"], point["mean_ms"] * 1e-3, ranks)[0] / 1e9, printed)
        check_printed(bandwidths("all_reduce", printed, 1.0, ranks)[1], point["busbw_GBps"])  # that was rounded first
    for (backend, ranks), points in sweeps.items():
        sizes, times = ([point[key] for point in points] for key in ("size_bytes", "mean_ms"))
        seconds = [time * 1e-3 for time in times]
        fit, small, large = (fit_sweep(sizes[part], seconds[part]) for part in (slice(4), slice(2), slice(2, 4)))
        ours = {
            "o_ms": fit.latency_s * 1e3,
            "w_GBps": fit.bytes_per_s / 1e9,
            "o_ms_from_1_10MiB": small.latency_s * 1e3,
            "o_ms_1MiB_minus_largeslope": (seconds[0] - sizes[0] / large.bytes_per_s) * 1e3,
            "w_GBps_from_100MiB_1GiB": large.bytes_per_s / 1e9,
            "bus_GBps": fit.bytes_per_s / 1e9 * bus_factor("all_reduce", ranks),
            "alpha_us_if_ring": fit.latency_s / (2 * (ranks - 1)) * 1e6,
            "rel_resid": list(fit.residuals),
        }
        check_printed(ours, row["our_value"]["fits"][f"{backend}{ranks}"], 3)
    for ranks, printed in row["our_value"]["nccl_over_gloo_speedup"].items():
        pair = [[point["mean_ms"] for point in sweeps[backend, int(ranks)]] for backend in ("gloo", "nccl")]
        check_printed(list(np.divide(pair[0], pair[1])), printed)


@checks("C.alpha_beta")
def _(row: Row) -> None:
    a, b, g, n, k = LINK.latency_s, 1 / LINK.bytes_per_s, 1 / LINK.reduce_bytes_per_s, RANKS, 5.0  # type: ignore[operator]
    log, share = np.log2(n), (n - 1) / n * S
    formulas = {
        "ring reduce-scatter": (ring_reduce_scatter, (n - 1) * a + share * (b + g)),
        "ring all-gather": (ring_all_gather, (n - 1) * a + share * b),
        "ring all-reduce": (ring_all_reduce, 2 * (n - 1) * a + 2 * share * b + share * g),
        "alternate ring (2026)": (alternate_ring_all_reduce, (n - 1) * a + (n - 1) * S * (b + g)),
        "gather-to-root all-reduce": (root_all_reduce, 2 * (n - 1) * (a + S * b) + (n - 1) * S * g),
        "recursive doubling all-reduce": (recursive_doubling_all_reduce, log * (a + S * b + S * g)),
        "recursive halving/doubling (Rabenseifner)": (
            halving_doubling_all_reduce,
            2 * log * a + 2 * share * b + share * g,
        ),
        "double binary tree all-reduce (pipelined)": (tree_all_reduce, 2 * log * a + 2 * S * b),
        "broadcast flat": (flat_broadcast, (n - 1) * (a + S * b)),
        "broadcast binomial tree": (tree_broadcast, np.ceil(log) * (a + S * b)),
        "broadcast scatter+all-gather": (scatter_gather_broadcast, (np.ceil(log) + n - 1) * a + 2 * share * b),
    }
    for name, (cost, expected) in formulas.items():
        assert name in row["our_value"] and close(cost(S, n, LINK).seconds, expected), name
    assert close(chain_broadcast(S, n, LINK, k).seconds, (n - 2 + k) * (a + S * b / k))
    best = best_num_chunks(S, n, LINK)[1:]  # between two ranks one chunk is best
    assert close(best, np.sqrt((n - 2) * S * b / a)[1:])
    at_best = (n[1:] - 2 + best) * (a + S * b / best)
    assert close(at_best, (np.sqrt((n[1:] - 2) * a) + math.sqrt(S * b)) ** 2)
    example, link = (684_395_520, 8), Link(1e-5, 4e9)
    ours = {
        "ring_ar": ring_all_reduce, "ring_rs": ring_reduce_scatter, "alt_ring": alternate_ring_all_reduce,
        "bcast_tree": tree_broadcast, "bcast_ring_kopt": chain_broadcast, "k_opt": None, "ar_root": root_all_reduce,
        "recdbl": recursive_doubling_all_reduce, "rabenseifner": halving_doubling_all_reduce,
    }  # fmt: skip
    check_printed(
        {
            name: best_num_chunks(*example, link) if cost is None else cost(*example, link).seconds * 1e3
            for name, cost in ours.items()
        },
        row["our_value"]["example S=684 MB, N=8, a=10us, W=4GB/s (ms)"],
    )
