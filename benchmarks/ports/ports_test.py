"""Ports end with the weights that their programs had before, and communicate as planned."""

import numpy as np
import pytest

from benchmarks.benchmark import Case, NotRun
from benchmarks.ports.measure import PROGRAMS, compare, measure, num_lines
from jaxddp.comparison_test import mostly_full


@pytest.mark.parametrize("name", mostly_full(["flax_mnist"], PROGRAMS))
def test_port(name):
    try:
        (row,) = measure(Case(name, PROGRAMS[name]), print)
    except NotRun as reason:
        pytest.skip(f"{name}: {reason}")
    assert row["check"] == "ok"


@pytest.mark.parametrize(
    ("start", "other_rank", "check"),
    [(0, 1, "ok"), (0, 1 + 1e-9, "WRONG: zero1"), (0, np.nan, "WRONG: zero1"), (1, 1, "WRONG: nothing was trained")],
)
def test_what_would_be_found(start, other_rank, check):
    begin, right, other = ({"w": np.full(3, value)} for value in (start, 1, other_rank))
    assert compare(begin, right, {"naive": [right, right], "zero1": [right, other]})["check"] == check


def test_lines_of_code_are_counted():
    def example(batches):
        """Is not counted."""
        total = sum(batches)

        # nor is this
        return total

    assert num_lines(example) == 3
