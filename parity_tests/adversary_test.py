"""Half a minute of the adversary, from another seed at each run, which a failure names."""

import time

from .adversary import findings


def test_half_a_minute_finds_nothing(ranks):
    seed = int(time.time())
    wrong = [f"{case}: {what}" for case, what in findings(30.0, seed, ranks) if what is not None]
    assert not wrong, f"python -m parity_tests.adversary --seed {seed}\n" + "\n".join(wrong)
