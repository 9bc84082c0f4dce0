"""Ratios and what they leave open."""

import math

import pytest

from benchmarks.harness.ratios import compare
from benchmarks.report.conftest import timed
from benchmarks.report.ratio import ratio_of

ONE, OTHER = [9.0, 8.0, 10.0, 9.5, 8.5], [10.0, 9.0, 11.0, 10.4, 9.6]


def rounds(times, **fields):
    return timed(sorted(times)[2]) | {"rounds_ms": times, "part": "jaxddp"} | fields


def test_rounds_of_one_part_are_resampled_in_pairs_and_others_each_on_their_own():
    paired, alone = (compare("", ONE, OTHER, 1.0, paired=paired) for paired in (True, False))
    found = ratio_of(rounds(ONE), rounds(OTHER))
    assert found == (0.9, paired.low, paired.high, True) and found.is_told
    found = ratio_of(rounds(ONE), rounds(OTHER, part="torchref"))
    assert found == (0.9, alone.low, alone.high, True) and not found.is_told
    assert ratio_of(rounds(ONE), rounds([*OTHER, 10.0])).value == 0.9  # nor of as many rounds


@pytest.mark.parametrize("times", [None, [], [9.0], [9.0, 0.0], [9.0, "9"], [9.0, math.nan], "fast"])
def test_what_has_no_rounds_goes_by_its_spread(times):
    found = ratio_of(rounds(ONE) | {"rounds_ms": times}, rounds(OTHER))
    assert found == pytest.approx((0.9, 0.9 * 0.95 / 1.05, 0.9 * 1.05 / 0.95, False))
    assert found.interval == "by p10 and p90 0.814 to 0.995" and found.is_told


def test_without_a_spread_there_is_no_ratio():
    assert ratio_of({"median_ms": 9.0}, rounds(OTHER)) is None
    assert ratio_of(timed(9.0), timed(0.0)) is None
