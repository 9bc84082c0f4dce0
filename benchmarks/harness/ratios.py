"""Ratios of medians with 95 % intervals, and their limits.

On a noisy machine a program's ratio to itself varies from 0.95 to 1.10, so a single ratio proves nothing: a gate holds
if the lower end of its interval is within the limit. Intervals come from resampled rounds, in pairs where both programs
were timed in the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 4000


@dataclass(frozen=True)
class Gate:
    """A ratio of step times and its limit."""

    name: str
    ratio: float
    low: float
    high: float
    limit: float
    ours_ms: float
    theirs_ms: float
    num_rounds: int

    @property
    def in_words(self) -> str:
        """The ratio with its interval."""
        return f"{self.ratio:.3f}, 95 % interval {self.low:.3f} to {self.high:.3f}, over {self.num_rounds} rounds"

    @property
    def holds(self) -> bool:
        """Whether the lower end of the interval is within the limit."""
        return self.low <= self.limit


def compare(name: str, ours: Sequence[float], theirs: Sequence[float], limit: float, *, paired: bool = True) -> Gate:
    """Compares the times of two variants by round.

    ``limit`` is the largest allowed ratio of their medians; ``paired`` tells whether both were timed in the same
    rounds.
    """
    rng = np.random.default_rng(0)
    samples = [np.asarray(ours), np.asarray(theirs)]
    chosen = [rng.integers(0, len(times), (NUM_RESAMPLES, len(times))) for times in samples]
    if paired:
        chosen[1] = chosen[0]
    resampled = [np.median(times[picks], axis=1) for times, picks in zip(samples, chosen, strict=True)]
    low, high = np.percentile(resampled[0] / resampled[1], [2.5, 97.5]).tolist()
    median_ours, median_theirs = (float(np.median(times)) for times in samples)
    return Gate(name, median_ours / median_theirs, low, high, limit, median_ours * 1e3, median_theirs * 1e3, len(ours))
