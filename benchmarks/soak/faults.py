"""The faults of a soak, drawn from a seed: every side gets the same list."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

KILL, STOP, FULL_DISK, PREEMPT, LAUNCHER = KINDS = (
    "rank killed (SIGKILL)",
    "rank stopped (SIGSTOP)",
    "disk full",
    "preempted (SIGTERM)",
    "launcher killed (SIGKILL)",
)
UNEXPECTED = "unexpected end"  # of a run to which nothing was done
_FEWEST_STEPS, _MOST_STEPS = 20, 200


class Fault(NamedTuple):
    """A fault.

    Attributes:
        rank: The one that is killed or stopped; without meaning for the other kinds.
        after_steps: Steps of training since the recovery from the fault before.
    """

    kind: str
    rank: int
    after_steps: int


def draw_faults(seed: int, num_ranks: int) -> Iterator[Fault]:
    """Draws faults without end, every kind once in each round of five.

    Example:
        >>> from itertools import islice
        >>> [fault.kind for fault in islice(draw_faults(0, 2), 5)].count(KILL)
        1
    """
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(KINDS, len(KINDS)):
            yield Fault(kind, rng.randrange(num_ranks), rng.randint(_FEWEST_STEPS, _MOST_STEPS))
