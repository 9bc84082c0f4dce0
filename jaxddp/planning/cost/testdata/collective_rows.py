"""Rows on collectives: alpha-beta costs, bus factors, measured sweeps.

In the alpha-beta model a message of m bytes takes ``a + m b``, and reducing it ``m g`` more. Ranks send at the same
time, each to one other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..bandwidth import bandwidths, bus_factor, fit_sweep
from . import Row, check_printed, checks, close
from .closed_forms import counted_bytes

RANKS = np.array([2, 4, 8, 64])
A, B, G = 3e-6, 1 / 7e9, 1 / 2e11
S = 1e8


def seconds(name: str, size: Any, n: Any, a: float, b: float, g: float) -> Any:
    """Seconds of a collective of S bytes over N ranks."""
    log, share = np.log2(n), (n - 1) / n * size
    return {
        "ring reduce-scatter": (n - 1) * a + share * (b + g),
        "ring all-gather": (n - 1) * a + share * b,
        "ring all-reduce": 2 * (n - 1) * a + 2 * share * b + share * g,
        "alternate ring (2026)": (n - 1) * a + (n - 1) * size * (b + g),
        "gather-to-root all-reduce": 2 * (n - 1) * (a + size * b) + (n - 1) * size * g,
        "recursive doubling all-reduce": log * (a + size * b + size * g),
        "recursive halving/doubling (Rabenseifner)": 2 * log * a + 2 * share * b + share * g,
        "double binary tree all-reduce (pipelined)": 2 * log * a + 2 * size * b,
        "broadcast flat": (n - 1) * (a + size * b),
        "broadcast binomial tree": np.ceil(log) * (a + size * b),
        "broadcast scatter+all-gather": (np.ceil(log) + n - 1) * a + 2 * share * b,
    }[name]


def chain_seconds(size: float, n: int, a: float, b: float, num_chunks: int) -> float:
    """A broadcast down a chain of N ranks, chunk by chunk, message by message."""
    arrived = np.zeros((n, num_chunks))  # when each rank has each chunk; the root has all of them
    for rank in range(1, n):
        free = 0.0
        for chunk in range(num_chunks):
            free = max(free, arrived[rank - 1, chunk]) + a + size / num_chunks * b
            arrived[rank, chunk] = free
    return float(arrived.max())


@checks("C.ring_ar")
def _(row: Row) -> None:
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
            elapsed += A + S / n * (B + G * (step < n - 1))
        assert np.array_equal(buffers, np.tile(total, (n, 1)))
        assert close(seconds("ring all-reduce", S, n, A, B, G), elapsed)
    assert row["our_value"].startswith("2(N-1) steps")


@checks("C.ring_rs_ag")
def _(row: Row) -> None:
    for half in ("ring reduce-scatter", "ring all-gather"):
        assert close(seconds("ring all-reduce", S, RANKS, A, B, 0) / seconds(half, S, RANKS, A, B, 0), 2)
    assert "exactly 2" in row["our_value"]


@checks("C.ar_equiv")
def _(row: Row) -> None:
    tree, ring = (
        seconds(name, S, RANKS, 0, B, 0)
        for name in ("double binary tree all-reduce (pipelined)", "ring all-reduce")
    )  # fmt: skip
    assert close(tree / ring, RANKS / (RANKS - 1))
    assert "gap N/(N-1) (2x at N=2, 1.14x at N=8)" in row["our_value"]


@checks("C.alt_ring")
def _(row: Row) -> None:
    ours = seconds("alternate ring (2026)", S, RANKS, 0, B, 0)
    assert close(ours, (RANKS - 1) * S * B)
    assert close(ours / seconds("ring all-reduce", S, RANKS, 0, B, 0), RANKS / 2)
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
        measured_s = [time * 1e-3 for time in times]
        fit, small, large = (fit_sweep(sizes[part], measured_s[part]) for part in (slice(4), slice(2), slice(2, 4)))
        ours = {
            "o_ms": fit.latency_s * 1e3,
            "w_GBps": fit.bytes_per_s / 1e9,
            "o_ms_from_1_10MiB": small.latency_s * 1e3,
            "o_ms_1MiB_minus_largeslope": (measured_s[0] - sizes[0] / large.bytes_per_s) * 1e3,
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
    for n, k in ((2, 5), (5, 5), (8, 3)):
        assert close(chain_seconds(S, n, A, B, k), (n - 2 + k) * (A + S * B / k))
    size, n, a, b = 684_395_520, 8, 1e-5, 1 / 4e9
    best = math.sqrt((n - 2) * size * b / a)
    at_best = (n - 2 + best) * (a + size * b / best)
    assert close(at_best, (math.sqrt((n - 2) * a) + math.sqrt(size * b)) ** 2)
    chain_s = min((n - 2 + k) * (a + size * b / k) for k in (math.floor(best), math.ceil(best)))
    names = {
        "ring_ar": "ring all-reduce", "ring_rs": "ring reduce-scatter", "alt_ring": "alternate ring (2026)",
        "bcast_tree": "broadcast binomial tree", "bcast_ring_kopt": None, "k_opt": None,
        "ar_root": "gather-to-root all-reduce", "recdbl": "recursive doubling all-reduce",
        "rabenseifner": "recursive halving/doubling (Rabenseifner)",
    }  # fmt: skip
    ours = {key: name and seconds(name, size, n, a, b, 0) * 1e3 for key, name in names.items()}
    ours |= {"bcast_ring_kopt": chain_s * 1e3, "k_opt": best}
    check_printed(ours, row["our_value"]["example S=684 MB, N=8, a=10us, W=4GB/s (ms)"])
    for name in row["our_value"]:
        if not name.startswith(("broadcast chain", "reduce", "example")):
            seconds(name, S, RANKS, A, B, G)
