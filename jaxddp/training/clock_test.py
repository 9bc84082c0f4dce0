import jax
import jax.numpy as jnp
import pytest

from jaxddp.comparison_test import refusal
from jaxddp.training.clock import stopwatch, summarize


def test_summary_is_median_and_percentiles_in_ms():
    # 0, 1, ... 10 ms: every tenth of the way is one of them.
    seconds = [0.001 * value for value in (10, 3, 7, 0, 1, 9, 5, 2, 8, 4, 6)]
    assert summarize(seconds) == pytest.approx((5.0, 1.0, 9.0))
    assert summarize([0.25]) == (250.0, 250.0, 250.0)
    assert "seconds (=[]) must hold at least one duration" in refusal(summarize, [])


def test_stopwatch_waits_before_and_after(monkeypatch):
    clock = iter([10.0, 17.5])
    events = []

    def now():
        events.append("clock")
        return next(clock)

    monkeypatch.setattr("jaxddp.training.clock.time.perf_counter", now)

    def call(text):
        events.append("call")
        return text.upper()

    result, seconds = stopwatch(call, "work", wait=events.append)
    assert (result, seconds) == ("WORK", 7.5)
    assert events == [("work",), "clock", "call", "WORK", "clock"]


def test_stopwatch_waits_for_jax_by_default(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda value: waited.append(value) or value)
    stopwatch(lambda x: x + 1, 1)
    assert waited == [(1,), 2]


def test_stopwatch_takes_arguments_that_are_donated_and_results_that_are_no_arrays():
    give_up = jax.jit(lambda x: x * 2, donate_argnums=0)
    (doubled, note), _ = stopwatch(lambda x: (give_up(x), "note"), jnp.arange(4.0))
    assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0] and note == "note"
