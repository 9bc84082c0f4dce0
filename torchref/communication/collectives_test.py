"""Functions that ranks run stand at the top; integer-valued data make every sum exact, so comparisons are bitwise."""

import threading

import pytest
import torch
import torch.distributed as dist

from torchref.communication.collectives import (
    Issued,
    all_gather,
    all_reduce,
    broadcast,
    record,
    reduce,
    reduce_scatter,
    send_recv,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32]


def integer_valued(num_ranks, *shape, dtype=torch.float32):
    """One tensor per rank, [num_ranks, *shape]; small integers, so that even bfloat16 sums are exact."""
    return torch.randint(-8, 9, (num_ranks, *shape), generator=torch.Generator().manual_seed(num_ranks)).to(dtype)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected)


def check_equations(x, group=None, own=None, async_op=False):
    """Every primitive against its equation, all in flight at once if asynchronous.

    Args:
        x: [num_ranks, num_ranks * k, ...], the same on every rank.
        own: This rank's part, in other strides.
    """
    rank, num_ranks, root = dist.get_rank(group), dist.get_world_size(group), dist.get_world_size(group) - 1
    own, total = x[rank].clone() if own is None else own, x.sum(dim=0, dtype=x.dtype)
    summed, sent = (torch.empty_strided(own.shape, own.stride(), dtype=own.dtype).copy_(own) for _ in range(2))
    chunk_length = x.shape[1] // num_ranks
    is_root = rank == root
    # Two ways at once and a rank to itself: a send that waits for its receive would deadlock here.
    swap = {0: root, root: 0}
    options = {"group": group, "async_op": async_op}
    started = [(summed, all_reduce(summed, **options), total), (sent, broadcast(sent, root=root, **options), x[root])]
    results = [
        (reduce_scatter(own, **options), total[rank * chunk_length : (rank + 1) * chunk_length]),
        (all_gather(own, **options), x.flatten(0, 1)),
        (reduce(own, root=root, **options), total if is_root else torch.zeros_like(total)),
        (send_recv(own, [(0, root)], **options), x[0] if is_root else torch.zeros_like(own)),
        (send_recv(own, sorted(swap.items()), **options), x[swap[rank]] if rank in swap else 0 * own),
    ]
    started += [(*(found if async_op else (found, None)), expected) for found, expected in results]
    for found, work, expected in started:
        assert (work is not None) == async_op
        for _ in range(2 * async_op):  # once more is harmless
            work.wait()
        assert_same(found, expected)
    assert summed.stride() == sent.stride() == own.stride()
    assert_same(own, x[rank])  # nothing but the in-place ones may write to their input


def check_equations_of_all_dtypes_and_shapes():
    num_ranks = dist.get_world_size()
    for dtype in DTYPES:
        for async_op in (False, True):
            check_equations(integer_valued(num_ranks, 2 * num_ranks, 3, dtype=dtype), async_op=async_op)
    for shape in ((num_ranks,), (0,), (0, 3), (num_ranks, 0)):
        check_equations(integer_valued(num_ranks, *shape))
    all_reduce(scalar := torch.tensor(2.0))
    assert_same(scalar, torch.tensor(2.0 * num_ranks))
    broadcast(of_root := torch.tensor(1.0 + dist.get_rank()))  # rank 0 is the root unless said
    assert of_root == 1 and reduce(torch.tensor(1.0)) == (num_ranks if dist.get_rank() == 0 else 0)


def check_equations_in_a_group():
    odd = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        check_equations(integer_valued(2, 4, 3), odd)


def check_strides():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = integer_valued(num_ranks, num_ranks * 2, 6)
    # Every second column of a wider tensor; and rows against columns, a different layout on each rank.
    gaps = torch.zeros(num_ranks * 2, 12)[:, ::2].copy_(x[rank])
    turned = x[rank].clone() if rank % 2 else x[rank].t().contiguous().t()
    for own in (gaps, turned):
        for async_op in (False, True):
            check_equations(x, own=own, async_op=async_op)


def issue_everything():
    num_ranks = dist.get_world_size()
    own = torch.zeros(num_ranks * 3, 5, dtype=torch.bfloat16)
    all_reduce(own)  # before: not recorded
    with record() as outer:
        with record():
            pass  # as empty as the outer one, which must stay open
        all_reduce(own)
        with record() as inner:
            reduce_scatter(own, async_op=True)[1].wait()
            all_gather(own)
        broadcast(own)
        # Autograd runs hooks on threads of its own.
        thread = threading.Thread(target=reduce, args=(own,))
        thread.start()
        thread.join()
        send_recv(own, [(rank, rank) for rank in range(num_ranks)])
    all_reduce(own)  # after: not recorded
    return outer, inner


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_primitive_equals_its_equation(ranks, num_ranks):
    ranks.run(check_equations_of_all_dtypes_and_shapes, num_ranks=num_ranks)


def test_ranks_are_counted_within_the_group(ranks):
    ranks.run(check_equations_in_a_group, num_ranks=4)


def test_strides_do_not_matter(ranks):
    ranks.run(check_strides, num_ranks=2)


def test_record_lists_the_collectives_of_its_block(ranks):
    num_ranks, full_bytes = 2, 2 * 3 * 5 * 2
    kinds = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "send-recv")
    outer = [Issued(kind, full_bytes * (num_ranks if kind == "all-gather" else 1)) for kind in kinds]
    assert ranks.run(issue_everything, num_ranks=num_ranks) == [(outer, outer[1:3])] * num_ranks
