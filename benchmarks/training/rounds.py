"""The rounds of one framework: its variants by turns, then several steps in a row, then steps timed on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from torchref.launch import report

from ..harness.ranks import Ranks
from .device_time import Start, time_on_device
from .interleaving import Attempts, Variant, agree_over_ranks, interleave, time_in_a_row
from .measure import Measured, SideResult, StepMetrics, TrainingSetup, largest_difference, ranks_in_words


def time_rounds(
    framework: str,
    ranks: Ranks,
    setup: TrainingSetup,
    attempt: Attempts,
    probes: Sequence[Variant],
    expected: list[StepMetrics],
    trained: dict[str, np.ndarray],
    *,
    time_step: Callable[[Start, int], float],
    wait_for_turn: Callable[[], None],
    wait: Callable[[Any], Any],
    **described: Any,
) -> SideResult:
    """Times the variants that could be made, and probes in the same rounds; every rank must call it.

    A variant has ``step``, ``start``, ``weights`` and what `Measured` says of it. ``expected`` and ``trained`` are
    metrics and weights of single-process training; ``described`` are other fields of the result.
    """
    report(("doing", "training"))
    together: dict[str, Any] = {"barrier": dist.barrier, "agree": agree_over_ranks, "wait_for_turn": wait_for_turn}
    variants = [Variant(label, one.step) for label, one in attempt.made.items()]
    times, failed = interleave([*variants, *probes], len(setup.batches), setup.num_warmup, wait=wait, **together)
    is_first = dist.get_rank() == 0
    measured = {}
    for spec in setup.of(framework):
        if spec.label in times:
            made, (metrics, seconds) = attempt.made[spec.label], times[spec.label]
            baseline = times.get(spec.without_communication[0], ([], []))[1]
            difference = largest_difference(made.weights(), trained)
            measured[spec.label] = Measured(
                made.planned, made.found, metrics, expected, difference, seconds, baseline, made.buckets,
                made.schedule if is_first else None,
            )  # fmt: skip
    starts = {label: attempt.made[label].start for label in measured}
    if setup.num_in_a_row:
        in_a_row = time_in_a_row(starts, setup.num_in_a_row, len(setup.batches), wait=wait, **together)
        for label, seconds in in_a_row.items():
            measured[label].in_a_row_seconds = seconds
    if setup.num_on_device:
        on_device, untimed = time_on_device(starts, setup.num_on_device, len(setup.batches), time_step, **together)
        for label, one in measured.items():
            one.device_seconds, one.no_device_seconds = on_device.get(label, []), untimed.get(label, "")
    kind, words = ranks_in_words(ranks, framework)
    return SideResult(
        num_ranks=ranks.num,
        kind=kind,
        ranks=words,
        backend=ranks.backend[framework],
        trained=trained if is_first else {},
        measured=measured,
        failed=attempt.failed | failed,
        probes={probe.label: times[probe.label][1] for probe in probes},
        in_turns=bool(setup.turns),
        **described,
    )
