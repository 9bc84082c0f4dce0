"""Places on an axis, and what is written at it."""

import pytest

from benchmarks.report.axis import linear, logarithmic


def test_places_on_a_linear_axis():
    axis = linear([3.0, 17.0])
    assert (axis.at(0), axis.at(8.5), axis.at(17), axis.at(99), axis.at(-1)) == (0, 0.5, 1, 1, 0)


def test_places_on_a_logarithmic_axis():
    axis = logarithmic([1, 100])
    assert axis.at(10) == pytest.approx(0.5)  # by symmetry: both ends have the same room
    assert axis.at(100) - axis.at(10) == pytest.approx(axis.at(10) - axis.at(1))
    assert (axis.at(0), axis.at(-3), axis.at(1e9)) == (0, 0, 1)


@pytest.mark.parametrize("values", [[0.0], [], [5.0, 5.0], [-3.0, 2.0], [1e-9, 3e-9], [1e12]])
@pytest.mark.parametrize("make", [linear, logarithmic])
def test_every_axis_has_a_length_and_few_ticks_within_it(make, values):
    axis = make(values)
    assert axis.low < axis.high
    assert len(axis.ticks) <= 7
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)


def test_ticks():
    assert linear([0.9, 1.3], start=0.9).ticks == (0.9, 1.0, 1.1, 1.2, 1.3)
    assert logarithmic([1, 10**9]).ticks == (1, 100, 10**4, 10**6, 10**8)
    assert logarithmic([8, 64], ticks=[8, 16, 64, 128]).ticks == (8, 16, 64)
    assert logarithmic([0.9, 1.2]).ticks == (0.9, 1.0, 1.1, 1.2)  # between powers of ten
