import numpy as np
import pytest

from jaxddp.planning.cost.bandwidth import bandwidths, bus_factor, fit_sweep


@pytest.mark.parametrize(("kind", "passes"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_bus_bandwidth_is_the_links_whatever_the_number_of_ranks(kind, passes):
    """Rings without latency send chunks of S / n at the rate of the link, n-1 per pass."""
    ranks = np.arange(2, 100)
    algbw, busbw = bandwidths(kind, 1e7, passes * (ranks - 1) * (1e7 / ranks) / 3e9, ranks)
    assert np.allclose(busbw, 3e9, rtol=1e-12)  # rounding
    assert np.allclose(algbw * bus_factor(kind, ranks), busbw, rtol=1e-12)


def test_a_sweep_gives_back_the_two_numbers_it_was_made_of():
    sizes = np.array([1e3, 1e6, 1e9])
    fit = fit_sweep(sizes, 2e-4 + sizes / 4e9)
    assert fit.latency_s == pytest.approx(2e-4, rel=1e-9) and fit.bytes_per_s == pytest.approx(4e9, rel=1e-9)
    assert max(abs(fit.residuals)) < 1e-9 > fit.latency_error_s / fit.latency_s
    assert fit.bytes_per_s_error / fit.bytes_per_s < 1e-9


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ([1e6], [1e-3], "num_bytes (=[1000000.0]) must be at least two different sizes"),
        ([1e6, 1e6], [1e-3, 2e-3], "num_bytes (=[1000000.0, 1000000.0]) must be at least two different sizes"),
        ([1e6, 2e6], [1e-3], "num_bytes (=[1000000.0, 2000000.0]) must be at least two different sizes"),
        ([1e6, 2e6], [1e-3, 0.0], "seconds (=0.0) must be a positive finite number"),
        ([1e6, -2e6], [1e-3, 1e-3], "num_bytes (=-2000000.0) must be a finite number, 0 or more"),
        ([1e6, 2e6], [2e-3, 1e-3], "seconds (=[0.002, 0.001]) must grow with num_bytes"),
    ],
)
def test_sweeps_that_say_nothing(sizes, seconds, said):
    with pytest.raises(ValueError) as raised:
        fit_sweep(sizes, seconds)
    assert str(raised.value).startswith(said)


def test_other_bad_input():
    with pytest.raises(ValueError, match=r"^kind \(='all-reduce'\) must be one of all_reduce, "):
        bus_factor("all-reduce", 4)
    with pytest.raises(ValueError, match=r"^num_ranks \(=0\) must be a whole number, 1 or more$"):
        bus_factor("gather", 0)
    with pytest.raises(ValueError, match=r"^seconds \(=0\) must be a positive finite number$"):
        bandwidths("reduce", 10, 0, 2)
