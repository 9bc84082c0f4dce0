"""The first cases of the adversary, whose command line draws from other seeds for as long as it is given."""

import pytest

from .adversary import findings

FIRST, NUM_ALL = 5000, 40  # the same cases each time; the command line draws others


@pytest.mark.full
@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_ALL))
def test_the_first_cases_find_nothing(seed, ranks):
    found = list(findings(float("inf"), seed, ranks, num_cases=1))
    assert len(found) == 5  # a training in JAX and four lives of wrappers
    wrong = [f"{case}: {what}" for case, what in found if what is not None]
    assert not wrong, f"python -m parity_tests.adversary --seed {seed} --cases 1\n" + "\n".join(wrong)
