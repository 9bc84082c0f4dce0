"""The first cases of the adversary, whose command line draws from other seeds for as long as it is given."""

import pytest

from .adversary import findings


@pytest.mark.parametrize("num_seeds", [12, pytest.param(60, marks=pytest.mark.full)])
def test_the_first_cases_find_nothing(num_seeds, ranks):
    seed = 5000  # the same cases each time; the command line draws others
    found = list(findings(float("inf"), seed, ranks, num_cases=num_seeds))
    assert len(found) == 5 * num_seeds  # a training in JAX and four lives of wrappers each
    wrong = [f"{case}: {what}" for case, what in found if what is not None]
    assert not wrong, f"python -m parity_tests.adversary --seed {seed}\n" + "\n".join(wrong)
