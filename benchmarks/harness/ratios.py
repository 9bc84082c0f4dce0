"""Ratios of step times with 95 % intervals, and their limits.

On a noisy machine a program's ratio to itself varies from 0.95 to 1.10, so a single ratio proves nothing. Where both
programs were timed in the same rounds, the ratio is the median of the rounds' ratios: what slows both for some rounds
cancels. Else it is that of the two medians. Intervals come from resampled rounds.

| ratio            | its 95 % interval                       | verdict        |
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
    def verdict(self) -> str:
        """``"ok"``, ``"MISSED"``, or ``"not judged: "`` and why."""
        if self.low > self.limit:
            return "MISSED"
        if self.high - self.low > WIDEST * self.limit:
            return f"{NOT_JUDGED}interval too wide"
        return "ok" if self.ratio <= self.limit else f"{NOT_JUDGED}limit in interval"


def compare(name: str, ours: Sequence[float], theirs: Sequence[float], limit: float, *, paired: bool = True) -> Gate:
    """Compares the times of two variants by round.

    ``limit`` is the largest allowed ratio; ``paired`` tells whether both were timed in the same rounds.
    """
    rng = np.random.default_rng(0)
    samples = [np.asarray(ours), np.asarray(theirs)]
    compared = [samples[0] / samples[1]] if paired else samples
    resampled = [np.median(rng.choice(values, (NUM_RESAMPLES, len(values))), axis=1) for values in compared]
    ratios = resampled[0] if paired else resampled[0] / resampled[1]
    low, high = np.percentile(ratios, [2.5, 97.5]).tolist()
    median_ours, median_theirs = (float(np.median(times)) for times in samples)
    ratio = float(np.median(compared[0])) if paired else median_ours / median_theirs
    return Gate(name, ratio, low, high, limit, median_ours * 1e3, median_theirs * 1e3, len(ours))
