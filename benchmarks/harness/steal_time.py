"""Steal time: processor time that a virtual machine's host gave to others.

Measurements take longer meanwhile, so times that were not interleaved cannot be compared. Linux counts it in
``/proc/stat``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MUCH = 0.05  # of all time; a machine whose times repeat showed 0 to 0.03
_STAT = Path("/proc/stat")


class Ticks(NamedTuple):
    """Processor time since the machine started.

    Attributes:
        steal: Ticks that the host gave to others.
        total: All ticks.
    """

    steal: int
    total: int


def ticks() -> Ticks:
    """Reads the counters; all 0 where the system has none."""
    if not _STAT.exists():
        return Ticks(0, 0)
    # user, nice, system, idle, iowait, irq, softirq, steal; the guests' times that follow are part of user.
    counted = [int(one) for one in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return Ticks(counted[7], sum(counted))


def steal_share(since: Ticks) -> float:
    """The share of processor time that was stolen since an earlier reading of ``ticks``."""
    now = ticks()
    return (now.steal - since.steal) / max(1, now.total - since.total)


def in_words(share: float) -> str:
    """The share in words; empty if it was not much."""
    return f"{share:.0%} of the processors' time went to others by this machine's host" if share > MUCH else ""
