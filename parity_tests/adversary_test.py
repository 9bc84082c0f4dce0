"""Half a minute of the adversary, whose command line draws from other seeds for as long as it is given."""

import pytest

from .adversary import findings


@pytest.mark.parametrize("seconds", [30.0, pytest.param(120.0, marks=pytest.mark.full)])
def test_the_first_cases_find_nothing(seconds, ranks):
    seed = 5000  # the same cases each time; the command line draws others
    wrong = [f"{case}: {what}" for case, what in findings(seconds, seed, ranks) if what is not None]
    assert not wrong, f"python -m parity_tests.adversary --seed {seed}\n" + "\n".join(wrong)
