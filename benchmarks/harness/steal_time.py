"""Steal time: processor time that a virtual machine's host gave to others, from ``/proc/stat``.

It lengthens measurements, so times that were not interleaved cannot be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MUCH = 0.05  # share of all time; a machine with repeatable times showed 0 to 0.03
_STAT = Path("/proc/stat")


class Ticks(NamedTuple):
    """Processor time since the machine started: ticks that the host gave to others, and all ticks."""

    steal: int
    total: int


def ticks() -> Ticks:
    """Reads the counters; 0 where the system has none."""
    if not _STAT.exists():
        return Ticks(0, 0)
    # user, nice, system, idle, iowait, irq, softirq, steal; the guests' times that follow are part of user.
    counted = [int(one) for one in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return Ticks(counted[7], sum(counted))


def steal_share(since: Ticks) -> float:
    """The share of processor time stolen since an earlier reading."""
    now = ticks()
    return (now.steal - since.steal) / max(1, now.total - since.total)


def in_words(share: float) -> str:
    """The share in words; empty if it is small."""
    return f"{share:.0%} of the processors' time went to others by this machine's host" if share > MUCH else ""
