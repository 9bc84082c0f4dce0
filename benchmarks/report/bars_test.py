"""Bars are as long as their numbers say."""

import re

from benchmarks.report.axis import linear
from benchmarks.report.bars import Bar, draw_bars
from benchmarks.report.figure import TICK_ROOM

AXIS = linear([100.0])


def test_segments_lie_end_to_end():
    bar = Bar("", "naive", "100 ms", ((0, 60.0, "compute"), (1, 40.0, "exposed")), (90.0, 100.0))
    body = draw_bars([bar], AXIS, "ms").body
    assert re.findall(r'<rect x="(.*?)" y="18" width="(.*?)"', body) == [("0.00%", "60.00%"), ("60.00%", "40.00%")]
    assert re.findall(r'<line x1="(\S+)" y1="24.0" x2="(\S+)"', body) == [("90.00%", "100.00%")]
    assert "<title>exposed</title>" in body and ">100 ms</text>" in body


def test_members_of_a_group_come_together_below_its_name():
    body = draw_bars([Bar("a", "one", ""), Bar("b", "two", ""), Bar("a", "three", "")], AXIS, "ms").body
    assert re.findall(r'class="(?:heading|label)">(\w+)<', body) == ["a", "one", "three", "b", "two"]


def test_long_texts_get_a_line_each_and_longer_ones_are_cut():
    short, long = Bar("", "a", "b"), Bar("", "a" * 99, "b" * 30)
    alone, together = (draw_bars(bars, AXIS, "ms") for bars in ([short], [short, long]))
    assert (together.height - TICK_ROOM) > 2 * (alone.height - TICK_ROOM)
    assert "a" * 51 + "…" in together.body and "b" * 30 in together.body


def test_a_bar_without_a_number_has_no_length():
    assert "<rect" not in draw_bars([Bar("", "naive", "✗ WRONG, see the table")], AXIS, "ms").body


def test_a_limit_and_a_point_are_where_they_belong():
    body = draw_bars([Bar("", "gate", "", (), (20.0, 40.0), 30.0, 50.0)], AXIS, "ratio").body
    assert 'cx="30.00%"' in body
    assert re.search(r'x1="50.00%" y1="15.0" x2="50.00%" y2="33.0" class="limit"', body)
