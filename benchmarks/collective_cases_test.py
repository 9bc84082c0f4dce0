"""Expected results are those of NumPy's own arithmetic; what is wrong is counted, what is issued is planned."""

import numpy as np
import pytest

from benchmarks import collective_cases
from benchmarks.collective_cases import NAMES, PERIOD, expected, num_wrong, options_of, rates, values

LENGTH = 3 * 1000  # of the full buffer; no multiple of the period, so that the last one is cut off
FULL_BYTES = LENGTH * collective_cases.ELEMENT_BYTES


def by_definition(name, rank, num_ranks):
    """What a collective is, written out over whole arrays."""
    brought = [values(each, collective_cases.brought_length(name, FULL_BYTES, num_ranks)) for each in range(num_ranks)]
    match name.removeprefix("ring_"):
        case "all_reduce":
            return sum(brought)
        case "reduce_scatter":
            return np.split(sum(brought), num_ranks)[rank]
        case "all_gather":
            return np.concatenate(brought)
        case "broadcast":
            return brought[options_of(name, num_ranks)["root"]]
        case "reduce":
            return sum(brought) if rank == options_of(name, num_ranks)["root"] else np.zeros(LENGTH)
        case "send_recv":
            return brought[next(source for source, target in options_of(name, num_ranks)["pairs"] if target == rank)]


@pytest.mark.parametrize("num_ranks", [2, 3, 6])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_expected_is_what_the_collective_means(name, num_ranks):
    for rank in range(num_ranks):
        result = by_definition(name, rank, num_ranks)
        segments = expected(name, rank, num_ranks, LENGTH)
        assert num_wrong(result, segments) == 0
        result = result.copy()
        result[[0, PERIOD, -1]] += 1
        assert num_wrong(result, segments) == 3
        assert num_wrong(result[:-5], segments) == 2 + 5
        assert num_wrong(np.append(by_definition(name, rank, num_ranks), 0), segments) == 1


def test_no_rank_brings_what_another_does_and_no_chunk_of_a_sum_is_like_another():
    """Else a result in the wrong place could pass for the right one."""
    num_ranks = 8
    assert len({values(rank, PERIOD).tobytes() for rank in range(num_ranks)}) == num_ranks
    total = sum(values(rank, 2**14) for rank in range(num_ranks))
    assert len({chunk.tobytes() for chunk in np.split(total, 16)}) == 16
    assert total.max() < 2**24  # float32 counts so far in ones


def test_a_ring_is_rated_as_what_it_carries_out():
    assert rates("ring_all_reduce", 2 * 10**9, 1.0, 4) == rates("all_reduce", 2 * 10**9, 1.0, 4) == (2.0, 3.0)
    assert rates("send_recv", 10**9, 0.5, 4) == (2.0, 2.0)
