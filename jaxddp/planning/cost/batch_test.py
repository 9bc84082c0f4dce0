import numpy as np
import pytest

from jaxddp.planning.cost.batch import accumulation_steps, global_batch, samples


def test_steps_undo_the_product_for_whole_arrays():
    micro, steps, ranks = np.meshgrid([1, 2, 3], [1, 4], [1, 8, 512])
    assert np.array_equal(accumulation_steps(global_batch(micro, steps, ranks), micro, ranks), steps)


def test_every_sample_is_worked_on_once():
    micro, steps, ranks = 2, 3, 4
    worked_on = [(rank, step, place) for rank in range(ranks) for step in range(steps) for place in range(micro)]
    assert len(worked_on) == global_batch(micro, steps, ranks)


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, -2, 1), (1, 1, 0.5)])
def test_counts_are_whole(bad):
    with pytest.raises(ValueError, match="must be a whole number, 1 or more"):
        global_batch(*bad)
    with pytest.raises(ValueError, match="must be a whole number, 1 or more"):
        accumulation_steps(*bad)


def test_samples_of_no_length():
    with pytest.raises(ValueError, match=r"^sequence_length \(=0\) must be a positive finite number$"):
        samples(100, 0)
