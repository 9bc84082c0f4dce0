"""Where the time of a run went: goodput is the share of it in which steps were taken for the first time.

Every moment belongs to one part, so the parts add up to the whole. A moment's part is that of the next event:

| next event       | part                                                                                   |
|------------------|----------------------------------------------------------------------------------------|
| step             | useful steps if it was never taken before, else repeated steps; `save_s` of it: saving |
| compiled         | compilation, for the seconds that it took; what is before it is starting or restarting |
| started          | start before the first step of all, restart after it                                   |
| noticed          | detection: a fault has happened, and nobody knows                                      |
| ended            | restart: the processes that are left end                                               |
| over             | restart: the run ends before another step                                              |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = USEFUL, REPEATED, SAVING, START, COMPILATION, DETECTION, RESTART = (
    "useful steps", "repeated steps", "saving", "start", "compilation", "detection", "restart",
)  # fmt: skip


def account(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Divides the time from the first to the last event of rank 0 and of the job: seconds by part."""
    parts = dict.fromkeys(PARTS, 0.0)
    since, newest = events[0]["at_s"], 0
    for event in events[1:]:
        seconds, since = event["at_s"] - since, event["at_s"]
        if event["kind"] == "step":
            parts[SAVING] += (saving := min(seconds, event["save_s"]))
            parts[USEFUL if event["step"] > newest else REPEATED] += seconds - saving
            newest = max(newest, event["step"])
            continue
        starting = RESTART if newest else START
        if event["kind"] == "compiled":
            parts[COMPILATION] += (compiling := min(seconds, event["seconds"]))
            parts[starting] += seconds - compiling
        else:
            parts[DETECTION if event["kind"] == "noticed" else starting] += seconds
    return parts
