"""The bucket benchmark's columns, and what it says in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..harness.tables import Column, plus_minus_cell, time_cell, value
from ..training.frameworks import BETWEEN
from ..training.steps import STEP_COLUMNS, collectives

MIB = 2**20

COLUMNS = (
    STEP_COLUMNS[0],
    Column("cap", "MiB", lambda row: f"{row['bucket_mb']:g}" if "bucket_mb" in row else row["part"]),
    Column("compiled", "", collectives("compiled")),
    Column("step", "ms", time_cell("median_ms")),
    Column("p10-p90", "ms", time_cell("p10_ms", "p90_ms")),
    Column("predicted", "ms", plus_minus_cell("predicted")),
    Column("error", "", value("error_share", "+.0%")),
    Column("simulated", "ms", plus_minus_cell("simulated")),
    Column("exposed", "ms", time_cell("exposed_ms", sign="+")),
    Column("p10-p90", "ms", time_cell("exposed_p10_ms", "exposed_p90_ms", sign="+")),
    Column("predicted", "ms", plus_minus_cell("predicted_exposed")),
    Column("best", "", lambda row: row["best"], is_text=True),
    STEP_COLUMNS[-1],
)


def notes(rows: Sequence[Mapping[str, Any]], optima: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Says what the numbers mean.

    Args:
        rows: Of the run.
        optima: Those of them that are about the best caps.

    Yields:
        Sentences.
    """
    for row in optima:
        yield in_words(row)
    yield (
        "predicted: the step without communication, and what an in-order pipeline of the real buckets leaves over;"
        " gradients are ready by their share of the FLOPs of forward and backward, whose time was measured as a whole,"
        " and sent in the time fitted to all-reduces of the same rounds; while both go on each does so at the rate that"
        " was measured, 50 % being as slow as one after the other"
    )
    yield (
        "+-: the standard deviation over predictions from rounds drawn anew, with replacement, from those timed: what"
        " noise in the probes moves them by"
    )
    for row in [row for row in rows if "is_async" in row][:1]:
        how = "asynchronous" if row["is_async"] else "synchronous, as XLA's are on CPUs, so that all of them shows"
        yield (
            "simulated: the compiled schedule of jaxddp, on the fitted network and a device as fast as measured; its"
            f" collectives are {how}; torchref compiles none"
        )
    yield "check: ok if the result is right and the prediction within 15 % of the measured step"
    for row in rows:
        if row["part"] == BETWEEN and "max_metric_difference" in row:
            yield (
                f"single-process JAX against single-process PyTorch: loss {row['max_metric_difference']:.1e},"
                f" {row['check']}"
            )


def in_words(row: Mapping[str, Any]) -> str:
    """Says in which regime a framework's step is, and which caps are best."""
    sending_ms = row["gradient_bytes"] / row["gb_per_s"] * 1e-6
    rate = f"{row['gb_per_s']:.3g} +- {row['gb_per_s_error']:.1g} GB/s"
    latency = f"{row['alpha_us']:.0f} +- {row['alpha_error_us']:.0f} us a call (standard errors of the fit)"
    as_good = ", ".join(f"{cap:g}" for cap in row["as_good_mb"])
    formula = row["uniform_optimum_mb"]
    equal = f"; by formula, equal buckets of {formula:.2g} MiB" if formula else ""
    return (
        f"{row['framework']}, {row['backend']}, is {row['regime']}: {row['gradient_bytes'] / MIB:.1f} MiB of gradients"
        f" take {sending_ms:.0f} ms at {rate} and {latency}, the backward"
        f" {row['backward_ms']:.0f} ms, and both at once {row['rate_at_once']:.0%} as fast as alone;"
        f" best measured {row['measured_optimum_mb']:g} MiB (as good: {as_good}),"
        f" predicted {row['optimum_mb']:g} MiB{equal} ({row['check']})"
    )
