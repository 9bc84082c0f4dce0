"""Rows on the handout of 2026: when data, fully sharded and tensor parallelism are compute-bound on GPUs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..scaling import Assumptions, DeviceRates, min_tokens, times
from ..workload import feed_forward
from . import Row, checks, close
from .closed_forms import most_fsdp_ranks, most_ranks, most_tp_ranks

# Three matrices, one egress rate, exact ring bytes. Any sizes work, since D cancels.
B, D, F = 300_000.0, 5120.0, 17_000.0
GATED = feed_forward(width=int(D), hidden=int(F), num_matrices=3)
H100 = DeviceRates(989.4e12, 450e9, 450e9)
HC, HW = H100.flops_per_s, H100.tp_bytes_per_s
EXACT = {passes: Assumptions(passes=passes, ring_factors=True) for passes in ("forward", "backward", "both")}
N = np.array([2.0, 8.0, 64.0])


@checks("H26.dp_a")
def _(row: Row) -> None:
    assert row["our_value"].startswith("12*B*D*F/N_DP")
    assert close(times(GATED, H100, B, 1, 1, N, EXACT["backward"]).compute_s, 12 * B * D * F / N / HC)


@checks("H26.dp_b")
def _(row: Row) -> None:
    assert row["our_value"].endswith("12*(N-1)/N*D*F/W")
    assert close(times(GATED, H100, B, 1, 1, N, EXACT["backward"]).dp_s, 12 * (N - 1) / N * D * F / HW)


@checks("H26.dp_c")
def _(row: Row) -> None:
    assert row["our_value"].startswith("N_DP <= 1 + B*W/C")
    limit = 1 + B * HW / HC
    assert close(most_fsdp_ranks(GATED, H100, B, EXACT["backward"]), limit)
    least = [min_tokens(GATED, H100, 1, 1, n, EXACT["backward"]) for n in (math.floor(limit), math.ceil(limit))]
    assert least[0] <= B < least[1]


@checks("H26.fsdp_a")
def _(row: Row) -> None:
    assert row["our_value"] == "backward 12*B*D*F/N, forward 6*B*D*F/N"
    for passes, count in (("forward", 6), ("backward", 12)):
        assert close(times(GATED, H100, B, N, 1, 1, EXACT[passes]).compute_s, count * B * D * F / N / HC)


@checks("H26.fsdp_b")
def _(row: Row) -> None:
    assert row["our_value"] == "forward 6*(N-1)/N*D*F/W (AG); backward 12*(N-1)/N*D*F/W (AG+RS)"
    for passes, count in (("forward", 6), ("backward", 12)):
        assert close(times(GATED, H100, B, N, 1, 1, EXACT[passes]).fsdp_s, count * (N - 1) / N * D * F / HW)


@checks("H26.fsdp_c")
def _(row: Row) -> None:
    assert row["our_value"] == "N_FSDP <= 1 + B*W/C for both passes"
    for passes in ("forward", "backward", "both"):
        assert close(most_fsdp_ranks(GATED, H100, B, EXACT[passes]), 1 + B * HW / HC)


@checks("H26.tp_b")
def _(row: Row) -> None:
    assert row["our_value"] == "forward 6*B*D*F/N_TP, backward 12*B*D*F/N_TP"
    for passes, count in (("forward", 6), ("backward", 12)):
        assert close(times(GATED, H100, B, 1, N, 1, EXACT[passes]).compute_s, count * B * D * F / N / HC)


@checks("H26.tp_c")
def _(row: Row) -> None:
    assert row["our_value"].startswith("forward 4*(N-1)/N*B*D/W, backward the same")
    for passes in ("forward", "backward"):
        assert close(times(GATED, H100, B, 1, N, 1, EXACT[passes]).tp_s, 4 * (N - 1) / N * B * D / HW)


@checks("H26.tp_d")
def _(row: Row) -> None:
    assert row["our_value"] == "backward N_TP <= 1 + 3*F*W/C; forward N_TP <= 1 + 1.5*F*W/C"
    for passes, count in (("forward", 1.5), ("backward", 3)):
        assert close(most_tp_ranks(GATED, H100, EXACT[passes]), 1 + count * F * HW / HC)


@checks("H26.2d_a")
def _(row: Row) -> None:
    assert row["our_value"] == "6*B*D*F/(N_FSDP*N_TP)"
    assert close(times(GATED, H100, B, 8, N, 1, EXACT["forward"]).compute_s, 6 * B * D * F / (8 * N) / HC)


@checks("H26.2d_b")
def _(row: Row) -> None:
    assert row["our_value"].startswith("max( 6*D*F/N_TP*(N_FSDP-1)/(N_FSDP*W), 4*B*D/N_FSDP*(N_TP-1)/(N_TP*W) )")
    overlapped = replace(EXACT["forward"], overlapped_axes=True)
    for tp in (2, 8, 64):
        ours = times(GATED, H100, B, N, tp, 1, overlapped).communication_s(overlapped)
        theirs = 6 * D * F / tp * (N - 1) / (N * HW), 4 * B * D / N * (tp - 1) / (tp * HW)
        assert close(ours, np.maximum(*theirs))


@checks("H26.2d_c")
def _(row: Row) -> None:
    assert row["our_value"].startswith("N <= (1 + B*W/C)*(1 + 1.5*F*W/C)")
    most = most_ranks(GATED, H100, B, replace(EXACT["forward"], overlapped_axes=True))
    assert close(most.fsdp * most.tp, (1 + B * HW / HC) * (1 + 1.5 * F * HW / HC))


@checks("H26.2d_d")
def _(row: Row) -> None:
    assert "K=3BFW/C+3F+2B: N <= K^2/(24BF) at N_F=K/(6F), N_T=K/(4B)" in row["our_value"]
    k = 3 * B * F * HW / HC + 3 * F + 2 * B
    most = most_ranks(GATED, H100, B, EXACT["forward"])
    assert close((most.fsdp, most.tp, most.fsdp * most.tp), (k / (6 * F), k / (4 * B), k**2 / (24 * B * F)))
