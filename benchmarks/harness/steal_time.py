"""The processors' time that a virtual machine did not get because its host gave it to others.

What is measured meanwhile takes longer, and two times that did not take turns cannot be compared. Linux counts it as
"steal" in ``/proc/stat``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MUCH = 0.05  # of all time; 0 to 0.03 were seen on a machine whose times repeat
_STAT = Path("/proc/stat")


class Ticks(NamedTuple):
    """What the processors did since the machine started.

    Attributes:
        stolen: Ticks of which nothing was got.
        total: All ticks.
    """

    stolen: int
    total: int


def ticks() -> Ticks:
    """Reads the counters; all 0 where nothing counts."""
    if not _STAT.exists():
        return Ticks(0, 0)
    # user, nice, system, idle, iowait, irq, softirq, steal; guests, which follow, are in user.
    counted = [int(one) for one in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return Ticks(counted[7], sum(counted))


def stolen_share(since: Ticks) -> float:
    """Gives the share of the processors' time that was not got since an earlier reading.

    Args:
        since: What ``ticks`` gave then.
    """
    now = ticks()
    return (now.stolen - since.stolen) / max(1, now.total - since.total)


def in_words(share: float) -> str:
    """Says what was taken; empty if it was not much."""
    return f"{share:.0%} of the processors' time went to others by this machine's host" if share > MUCH else ""
