import pytest

from jaxddp.training.clock import stopwatch, summarize


def test_summary_is_median_and_percentiles_in_ms():
    # 0, 1, ... 10 ms: every tenth of the way is one of them.
    seconds = [0.001 * value for value in (10, 3, 7, 0, 1, 9, 5, 2, 8, 4, 6)]
    assert summarize(seconds) == pytest.approx((5.0, 1.0, 9.0))
    assert summarize([0.25]) == (250.0, 250.0, 250.0)


def test_stopwatch_times_the_call_alone(monkeypatch):
    clock = iter([10.0, 17.5])
    monkeypatch.setattr("jaxddp.training.clock.time.perf_counter", lambda: next(clock))
    assert stopwatch(str.upper, "work") == ("WORK", 7.5)
