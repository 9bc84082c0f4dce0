"""A link does what was asked for, or is marked."""

import pytest

from benchmarks.lab.link import Link, measure_link
from benchmarks.lab.network import Lab
from jaxddp.training.clock import Timings


@pytest.mark.lab
def test_a_link_has_the_rate_that_was_asked_for():
    with Lab(3, 30) as lab:  # as slow as bursts make up for a machine that stands still for 70 ms
        link = measure_link(lab)
    assert link.check == "ok", link.in_words
    assert link.p10_mbit <= link.rate_mbit <= link.p90_mbit
    assert 0 < link.round_trip.median_ms < 50  # no delay is added: 0.03 ms were seen


@pytest.mark.parametrize(
    ("rate_mbit", "check"),
    [(957, "ok"), (901, "ok"), (899, "WRONG: more than 10 % off"), (1101, "WRONG: more than 10 % off")],
)
def test_a_link_that_is_off_is_marked(rate_mbit, check):
    link = Link(1000, rate_mbit, 880, 1110, Timings(0.03, 0.02, 0.04), "cubic")
    assert link.check == check
    assert link.in_words == (
        f"link: {rate_mbit} Mbit/s measured (p10 880, p90 1110), 1000 asked,"
        f" TCP cubic, round trip median 0.030 ms (p10 0.020, p90 0.040): {check}"
    )
