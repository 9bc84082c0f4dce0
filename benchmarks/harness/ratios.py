"""Ratios of medians with 95 % intervals, and their limits.

On a noisy machine a program's ratio to itself varies from 0.95 to 1.10, so a single ratio proves nothing. Intervals
come from resampled rounds, in pairs where both programs were timed in the same rounds.

| ratio of medians | its 95 % interval                       | verdict        |
|------------------|-----------------------------------------|----------------|
| any              | all of it beyond the limit              | ``MISSED``     |
| any              | wider than a fifth of the limit         | ``not judged`` |
| beyond the limit | reaches it                              | ``not judged`` |
| within the limit | anything else                           | ``ok``         |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NOT_JUDGED = "not judged: "
NUM_RESAMPLES = 4000
WIDEST = 0.2  # of the limit: with a wider interval anything would pass


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
    def verdict(self) -> str:
        """``"ok"``, ``"MISSED"``, or ``"not judged: "`` and why."""
        if self.low > self.limit:
            return "MISSED"
        if self.high - self.low > WIDEST * self.limit:
            return f"{NOT_JUDGED}interval too wide"
        return "ok" if self.ratio <= self.limit else f"{NOT_JUDGED}limit in interval"


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
