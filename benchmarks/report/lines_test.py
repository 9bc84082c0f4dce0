"""Curves go through their points, whatever order these come in."""

import re

from benchmarks.report.axis import linear
from benchmarks.report.lines import Curve, Point, draw_curves

X, Y = linear([10.0]), linear([100.0])


def test_a_curve_connects_its_points_in_the_order_of_x():
    points = [Point(10.0, 100.0), Point(0.0, 0.0), Point(5.0, 100.0, (50.0, 100.0))]
    body = draw_curves([Curve("one", 2, points, is_dashed=True)], X, Y, "x", "y").body
    line = r'<line x1="(\S+)%" y1="(\S+)" x2="(\S+)%" y2="(\S+)"/>'
    groups = dict(re.findall(r'<g class="(.*?)">(.*?)</g>', body))
    pieces = {name: [tuple(map(float, one)) for one in re.findall(line, group)] for name, group in groups.items()}
    assert pieces == {"l2 dashed": [(0, 244, 50, 24), (50, 24, 100, 24)], "l2": [(50, 134, 50, 24)], "k2": []}
    assert re.findall(r'<use href="#m2" x="(.*?)"', groups["k2"]) == ["0.00%", "50.00%", "100.00%"]
    assert "<title>one: 100 at 10</title>" in body


def test_a_marked_value_has_a_line_of_its_own():
    assert 'x1="40.00%"' in draw_curves([], X, Y, "x", "y", [4.0]).body.split('class="marked"')[0].split("<line")[-1]
