import itertools

import numpy as np
import pytest

from jaxddp.planning.cost.ownership import owned_bytes, owners


@pytest.mark.parametrize("rule", ["index", "greedy"])
def test_every_tensor_has_one_owner_and_nothing_is_lost(rule):
    sizes = [7, 1, 1, 30, 2, 2, 9]
    dealt = owners(sizes, 3, rule)
    assert dealt.shape == (7,) and set(dealt) <= {0, 1, 2}
    held = owned_bytes(sizes, dealt, 3, 8)
    assert held.sum() == 8 * sum(sizes)
    assert held[1] == 8 * sum(size for size, owner in zip(sizes, dealt, strict=True) if owner == 1)


def test_greedy_is_as_near_to_the_best_as_it_promises():
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes, ranks = rng.integers(1, 30, size=6).tolist(), int(rng.integers(2, 4))
        best = min(owned_bytes(sizes, dealt, ranks, 1).max() for dealt in itertools.product(range(ranks), repeat=6))
        greedy = owned_bytes(sizes, owners(sizes, ranks, "greedy"), ranks, 1).max()
        assert best <= greedy <= (4 / 3 - 1 / (3 * ranks)) * best


def test_bad_input():
    with pytest.raises(ValueError, match=r"^rule \(='size'\) must be one of index, greedy$"):
        owners([1], 2, "size")
    with pytest.raises(ValueError, match=r"^num_ranks \(=0\) must be a whole number, 1 or more$"):
        owners([1], 0)
    with pytest.raises(ValueError, match=r"^tensor_elements \(=-1\) must be a finite number, 0 or more$"):
        owned_bytes([-1], [0], 1, 8)
