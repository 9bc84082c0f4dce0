"""Interleaved rounds, and ratios of times with 95 % intervals.

On a noisy machine a program's ratio to itself varies from 0.95 to 1.10, so what is compared takes turns. The ratio of
two things that were timed in the same rounds is the median of the rounds' ratios: what slows both for some rounds
cancels. Otherwise it is that of the two medians. Intervals come from resampled rounds.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxddp.training.clock import stopwatch

from .benchmark import first_line

NUM_RESAMPLES = 4000
WIDEST = 0.2  # of the limit: with a wider interval anything would pass
_T = TypeVar("_T")


class Ratio(NamedTuple):
    """A ratio of times, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    def verdict(self, limit: float) -> str:
        """``"ok"``, ``"MISSED"``, or ``"not judged: "`` and why."""
        if self.low > limit:
            return "MISSED"
        if self.high - self.low > WIDEST * limit:
            return "not judged: interval too wide"
        return "ok" if self.ratio <= limit else "not judged: limit in interval"


def compare(ours: Sequence[float], theirs: Sequence[float], *, paired: bool) -> Ratio:
    """Compares times by round; ``paired`` tells whether both were timed in the same rounds.

    Example:
        >>> compare([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], paired=True)
        Ratio(ratio=2.0, low=2.0, high=2.0)
    """
    rng, samples = np.random.default_rng(0), [np.asarray(ours), np.asarray(theirs)]
    compared = [samples[0] / samples[1]] if paired else samples
    medians = [np.median(rng.choice(values, (NUM_RESAMPLES, len(values))), axis=1) for values in compared]
    low, high = np.percentile(medians[0] if paired else medians[0] / medians[1], [2.5, 97.5]).tolist()
    found = [float(np.median(values)) for values in compared]
    return Ratio(found[0] if paired else found[0] / found[1], low, high)


class Attempts:
    """Calls of which some fail: what raises on any rank is left out on all; ``failed`` has why, by label.

    ``agree`` turns what went wrong here, or "", into what went wrong on any rank.
    """

    def __init__(self, agree: Callable[[str], str]) -> None:
        self.failed: dict[str, str] = {}
        self._agree = agree

    def __call__(self, label: str, call: Callable[[], _T]) -> _T | None:
        """Calls it; None if it failed anywhere, with the reason in ``failed``."""
        said, made = "", None
        try:
            made = call()
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
        if said := self._agree(said):
            self.failed[label] = said
            return None
        return made


def interleave(
    steps: Mapping[str, Callable[[int], Any]], num_rounds: int, num_warmup: int, *, attempt: Attempts,
    before: Callable[[str], object] = lambda label: None, on_round: Callable[[int], object] = lambda done: None,
    after: Callable[[str, Any], Any] = lambda label, result: result,
) -> tuple[dict[str, list[Any]], dict[str, list[float]]]:  # fmt: skip
    """Times steps by turns: each runs once a round, in an order that is drawn for the round, alike on all ranks.

    A step takes the number of the round; one that fails in the first takes part in no other, and a later failure is
    raised. ``before`` and ``after`` are not timed: ranks meet in the first, the second gives what is kept of a result.
    Returned are by label what was kept of all ``num_rounds``, and the seconds of those after the first ``num_warmup``.
    """
    results: dict[str, list[Any]] = {label: [] for label in steps}
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for index in range(num_rounds):
        for label in random.Random(index).sample(list(steps), len(steps)):
            if label not in results:
                continue
            timed = partial(stopwatch, steps[label], index)
            before(label)
            found = timed() if index else attempt(label, timed)
            if found is None:
                del results[label], seconds[label]
                continue
            results[label].append(after(label, found[0]))
            if index >= num_warmup:
                seconds[label].append(found[1])
        on_round(index + 1)
    return results, seconds
