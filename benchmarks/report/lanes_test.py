"""Timelines: unions of intervals, and what is drawn of them."""

import re

from benchmarks.harness.intervals import Event
from benchmarks.report.axis import linear
from benchmarks.report.lanes import busy_ms, draw_lanes


def event(start_ms, end_ms, lane="a", phase="forward"):
    return Event(lane, "", phase, start_ms, end_ms)


def test_what_overlaps_counts_once():
    assert busy_ms([event(5, 8), event(0, 2), event(1, 4), event(6, 7)]) == 7
    assert busy_ms([]) == 0


def test_blocks_are_where_their_events_were():
    events = [event(0, 20), event(50, 100, "b", "all-reduce")]
    body = draw_lanes(events, ["a", "b"], {"forward": 0, "all-reduce": 1}, linear([100.0])).body
    found = re.findall(r'<rect x="(.*?)" y="(.*?)" width="(.*?)" height="20" class="(.*?)"', body)
    assert found == [("0.00%", "14", "20.00%", "a0"), ("50.00%", "58", "50.00%", "a1")]


def test_thousands_of_short_events_become_few_blocks():
    events = [event(start / 100, start / 100 + 0.009) for start in range(10000)]
    body = draw_lanes(events, ["a"], {"forward": 0}, linear([100.0])).body
    assert body.count("<rect") == 1
    apart = [event(start, start + 0.5) for start in range(100)]
    assert draw_lanes(apart, ["a"], {"forward": 0}, linear([100.0])).body.count("<rect") == 100
