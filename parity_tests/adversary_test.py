"""Half a minute of the adversary, whose command line draws from other seeds for as long as it is given."""

from .adversary import findings


def test_half_a_minute_finds_nothing(ranks):
    seed = 5000  # the same cases each time; the command line draws others
    wrong = [f"{case}: {what}" for case, what in findings(30.0, seed, ranks) if what is not None]
    assert not wrong, f"python -m parity_tests.adversary --seed {seed}\n" + "\n".join(wrong)
