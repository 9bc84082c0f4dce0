"""A backend as two numbers, fitted to the measured sizes: the latency of a call, and the rate of large buffers.

    t(S) = alpha + S / w        w: bytes of the buffer per second; w times the bus factor is what a rank sends

``planning.cost.bandwidth`` fits by relative error. The 95 % intervals come from the fit's residuals by Student's t, so
they include model error as well as noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxddp.network import Network
from jaxddp.planning.cost.bandwidth import fit_sweep

from ..harness.values import Row, by
from .cases import rates

MIN_SIZES = 3
POOR_ERROR = 0.5  # of a measured time; with a larger error, the two numbers do not describe the sweep
PREFERRED_KINDS = ("gpus", "lab", "processes", "simulated")
# 97.5th percentile of Student's t for 1, 2, ... degrees of freedom; the last is also used for more.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def fit_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Fits each collective of a backend that has at least three right sizes; an upper end of None is unbounded."""
    right = [row for row in rows if row["check"] == "ok" and "median_ms" in row]
    by_name = by(right, lambda row: row["collective"])
    return [_fit(name, of_name) for name, of_name in by_name.items() if len(of_name) >= MIN_SIZES]


def network_of(rows: Iterable[Row], framework: str, num_ranks: int, kind: str | None = None) -> Network:
    """Returns a measured backend as a network, by its all-reduce: bandwidth per rank, and a latency of 0 or more.

    Raises:
        ValueError: If there is no such fit.
    """
    fits = {
        row["kind"]: row
        for row in rows
        if row.get("collective") == "all_reduce" and row.get("alpha_us") is not None
        and (row["framework"], row["num_ranks"]) == (framework, num_ranks)
    }  # fmt: skip
    for each in (kind,) if kind else PREFERRED_KINDS:
        if each in fits:
            return Network(gb_per_s=fits[each]["bus_gb_per_s"], latency_us=max(0.0, fits[each]["alpha_us"]))
    of_kind = f" of kind {kind!r}" if kind else ""
    raise ValueError(f"no fit of {framework}'s all_reduce on {num_ranks} ranks{of_kind}: it takes {MIN_SIZES} sizes")


def _fit(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    sizes, seconds = [row["size_bytes"] for row in rows], [row["median_ms"] * 1e-3 for row in rows]
    made: dict[str, Any] = {"collective": name, "num_sizes": len(rows)}
    try:
        fit = fit_sweep(sizes, seconds)
    except ValueError:
        return made | {"alpha_us": None, "gb_per_s": None, "check": "poor: times do not grow with sizes"}
    student = _STUDENT[min(len(rows) - MIN_SIZES, len(_STUDENT) - 1)]
    alpha_us, alpha_error_us = fit.latency_s * 1e6, student * fit.latency_error_s * 1e6
    gb_per_s = fit.bytes_per_s / 1e9
    share = student * fit.bytes_per_s_error / fit.bytes_per_s  # relative error of the fitted seconds per byte
    worst = float(np.max(np.abs(fit.residuals)))
    return made | {
        "alpha_us": alpha_us,
        "alpha_low_us": alpha_us - alpha_error_us,
        "alpha_high_us": alpha_us + alpha_error_us,
        "gb_per_s": gb_per_s,
        "gb_per_s_low": gb_per_s / (1 + share),
        "gb_per_s_high": gb_per_s / (1 - share) if share < 1 else None,
        "bus_gb_per_s": rates(name, 10**9, 1 / gb_per_s, rows[0]["num_ranks"])[1],
        "worst_error": worst,
        "check": "ok" if worst <= POOR_ERROR else f"poor: off by up to {worst:.0%}",
    }
