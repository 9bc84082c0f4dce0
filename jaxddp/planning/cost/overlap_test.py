import math

import numpy as np
import pytest

from jaxddp.planning.cost.overlap import bucket_times_s, finish_s, uniform_optimum, uniform_tail_s


def end_of_pipeline(ready, send):
    """The recurrence, bucket by bucket."""
    end = 0.0
    for when, seconds in zip(np.maximum.accumulate(ready), send, strict=True):
        end = max(when, end) + seconds
    return end


def test_the_closed_form_is_the_recurrence():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        count = int(rng.integers(1, 12))
        ready, send = rng.exponential(size=count) * count, rng.exponential(size=count)
        assert finish_s(ready, send) == pytest.approx(end_of_pipeline(ready, send), rel=1e-12)  # in another order


def test_a_bucket_is_ready_with_its_last_tensor():
    ready, send = bucket_times_s([[0, 1], [2]], [4e6, 2e6, 1e6], [0.3, 0.1, 0.4], bytes_per_s=1e9, latency_s=1e-3)
    assert ready.tolist() == [0.3, 0.4]
    assert send == pytest.approx([0.007, 0.002], rel=1e-12)  # rounding


@pytest.mark.parametrize("seed", range(300))
def test_the_best_number_of_buckets_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    compute, send, latency = rng.uniform(0.01, 1), rng.uniform(0.01, 1), 10 ** rng.uniform(-4.5, -2)
    size, rate = send * 4e9, 4e9
    counts = np.arange(1, 20 + 4 * math.ceil(compute / latency))
    tails = uniform_tail_s(compute, size, counts, rate, latency)
    for count in (1, 2, 17):  # the formula of the tail is the pipeline's
        ready = np.cumsum(np.full(count, compute / count))
        piped = finish_s(ready, np.full(count, send / count + latency)) - compute
        assert piped == pytest.approx(tails[count - 1], rel=1e-9, abs=1e-15)  # rounding of 17 sums
    best = uniform_optimum(compute, size, rate, latency)
    assert best.tail_s <= tails.min() * (1 + 1e-9)  # a real number of buckets is no worse than any whole one
    assert counts[tails.argmin()] in (math.floor(best.num_buckets), math.floor(best.num_buckets) + 1)
    assert best.regime == ("communication-bound" if send >= compute else "compute-bound")
    if send >= compute:
        assert best.tail_s == pytest.approx(send - compute + 2 * math.sqrt(compute * latency), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: finish_s([], []), r"ready_s \(=\[\]\) must be a list of at least one bucket"),
        (lambda: finish_s(1.0, 1.0), r"ready_s \(=1.0\) must be a list of at least one bucket"),
        (lambda: finish_s([1.0], [-1.0]), r"communicate_s \(=-1.0\) must be a finite number, 0 or more"),
        (lambda: bucket_times_s([[]], [1], [1], 1, 0), r"tensors_per_bucket \(=0\) must be a whole number, 1 or more"),
        (lambda: bucket_times_s([[0]], [1], [1], 0, 0), r"bytes_per_s \(=0\) must be a positive finite number"),
        (lambda: uniform_tail_s(1, 1, 0, 1, 1), r"num_buckets \(=0\) must be a positive finite number"),
        (lambda: uniform_optimum(1, 1, 1, 0), r"latency_s \(=0\) must be a positive finite number"),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        call()
