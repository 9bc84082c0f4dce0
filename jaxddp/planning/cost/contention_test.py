import numpy as np
import pytest

from jaxddp.planning.cost.contention import rate_at_once, shared_finish_s
from jaxddp.planning.cost.overlap import finish_s


def test_who_shares_a_core_is_slower():
    rng = np.random.default_rng(2)
    for _ in range(300):
        count, rate = int(rng.integers(1, 8)), float(rng.uniform(0.3, 1))
        ready, send = np.cumsum(rng.exponential(size=count)), rng.exponential(size=count)
        compute = float(ready[-1] + rng.exponential() * rng.integers(2))
        computed, sent, now = 0.0, 0, 0.0
        left = send.tolist()
        while computed < compute or sent < count:  # from one event to the next
            is_sending, is_computing = sent < count and computed >= ready[sent], computed < compute
            speed = rate if is_sending and is_computing else 1.0
            events = [left[sent] / speed] if is_sending else [ready[sent] - computed] if sent < count else []
            step = min([*events, *([(compute - computed) / speed] if is_computing else [])])
            now += step
            if is_computing:
                computed += step * speed
                computed = next((point for point in (*ready, compute) if abs(point - computed) < 1e-12), computed)
            if is_sending:
                left[sent] -= step * speed
                sent += left[sent] < 1e-12
        assert shared_finish_s(compute, ready, send, rate) == pytest.approx(now, rel=1e-9)  # rounding of some 20 sums
        alone = max(compute, float(finish_s(ready, send)))
        assert shared_finish_s(compute, ready, send, 1.0) == pytest.approx(alone, rel=1e-12)
        # Measured by one bucket that is there from the start, the rate comes back.
        together = shared_finish_s(compute, [0.0], send[:1], rate)
        assert rate_at_once(compute, send[0], together) == pytest.approx(rate, rel=1e-9)


def test_a_rate_has_to_be_one():
    assert rate_at_once(1.0, 2.0, 1.9) == 1.0  # faster together than apart: noise
    for call, said in (
        (lambda: rate_at_once(1.0, 3.0, 2.0), r"together_s \(=2\) must be more than 2"),
        (lambda: shared_finish_s(1.0, [1.0], [1.0], 0.0), r"rate \(=0\) must be above 0 and at most 1"),
        (lambda: shared_finish_s(1.0, [2.0], [1.0], 0.5), r"ready_s \(=2\) must be at most compute_s \(=1\)"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
