"""Functions that ranks run stand at the top; integer-valued data make every sum exact, so comparisons are bitwise."""

import pytest
import torch
import torch.distributed as dist

from torchref.communication.collectives import Issued, all_gather, record, reduce_scatter
from torchref.communication.collectives_test import DTYPES, assert_same, integer_valued
from torchref.communication.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def check_against_the_library(group=None):
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    for dtype in DTYPES:
        own = integer_valued(num_ranks, 3 * num_ranks, 2, dtype=dtype)[rank]
        kept = own.clone()
        assert_same(ring_reduce_scatter(own, group), reduce_scatter(own, group))
        assert_same(ring_all_gather(own, group), all_gather(own, group))
        assert_same(own, kept)
        for shape in ((), (0,), (1,), (7,), (0, 5), (2, 3, 5)):
            x = integer_valued(num_ranks, *shape, dtype=dtype)
            assert_same(ring_all_reduce(x[rank], group), x.sum(dim=0, dtype=dtype))
            assert_same(x, integer_valued(num_ranks, *shape, dtype=dtype))


def check_any_data():
    rank = dist.get_rank()
    x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    wide = x[:, :64].reshape(4, 8, 8).clone().requires_grad_()
    total = ring_all_reduce(wide[rank].t())  # strides, and a leaf that requires a gradient
    assert not total.requires_grad
    # 4 summands of size about 1, each addition off by at most 2^-24 of a partial sum that stays below 16.
    assert (total - wide.detach().sum(dim=0).t()).abs().max() <= 4 * 16 * 2**-24


def results_may_be_written_to():
    """On one rank nothing is sent, but the result must still be another tensor."""
    x = torch.ones(4)
    for fn in (ring_reduce_scatter, ring_all_gather, ring_all_reduce):
        fn(x).zero_()
    assert_same(x, torch.ones(4))


def sends():
    num_ranks = dist.get_world_size()
    once = [Issued("send-recv", 5 * 4)] * (num_ranks - 1)  # 5 float32: a chunk, never the whole tensor
    for fn, length, expected in (
        (ring_reduce_scatter, 5 * num_ranks, once),
        (ring_all_gather, 5, once),
        (ring_all_reduce, 5 * num_ranks, 2 * once),
    ):
        with record() as issued:
            fn(torch.zeros(length))
        assert issued == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ring_equals_the_library_for_any_number_of_ranks(ranks, num_ranks):
    ranks.run(check_against_the_library, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("check", "num_ranks"), [(check_any_data, 4), (results_may_be_written_to, 1), (sends, 1), (sends, 2), (sends, 4)]
)
def test_rings_of_any_data_send_what_is_planned_into_new_tensors(ranks, check, num_ranks):
    ranks.run(check, num_ranks=num_ranks)
