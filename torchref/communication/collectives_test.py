"""Functions that ranks run stand at the top; integer-valued data make every sum exact, so comparisons are bitwise."""

import threading
from typing import Any

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


def in_place(collective, tensor, *args, **kwargs):
    tensor = tensor.clone()
    assert collective(tensor, *args, **kwargs) is None
    return tensor


def check_equations(x, group=None):
    """Checks every primitive against its equation; x is [num_ranks, num_ranks * k, ...], the same on every rank."""
    rank, num_ranks, root = dist.get_rank(group), dist.get_world_size(group), dist.get_world_size(group) - 1
    own, total = x[rank].clone(), x.sum(dim=0, dtype=x.dtype)
    chunk_length = x.shape[1] // num_ranks
    is_root = rank == root

    assert_same(in_place(all_reduce, own, group=group), total)
    assert_same(reduce_scatter(own, group=group), total[rank * chunk_length : (rank + 1) * chunk_length])
    assert_same(all_gather(own, group=group), x.flatten(0, 1))
    assert_same(in_place(broadcast, own, root=root, group=group), x[root])
    assert_same(reduce(own, root=root, group=group), total if is_root else torch.zeros_like(total))
    assert_same(send_recv(own, [(0, root)], group=group), x[0] if is_root else torch.zeros_like(own))
    # Two ways at once and a rank to itself: a send that waits for its receive would deadlock here.
    swap = {0: root, root: 0}
    assert_same(send_recv(own, sorted(swap.items()), group=group), x[swap[rank]] if rank in swap else 0 * own)
    assert_same(own, x[rank])  # nothing but the in-place ones may write to their input


def check_equations_of_all_dtypes_and_shapes():
    num_ranks = dist.get_world_size()
    for dtype in DTYPES:
        check_equations(integer_valued(num_ranks, 2 * num_ranks, 3, dtype=dtype))
    for shape in ((num_ranks,), (0,), (0, 3), (num_ranks, 0)):
        check_equations(integer_valued(num_ranks, *shape))
    assert_same(in_place(all_reduce, torch.tensor(2.0)), torch.tensor(2.0 * num_ranks))


def check_equations_in_a_group():
    odd = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        check_equations(integer_valued(2, 4, 3), odd)


def check_async():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = integer_valued(num_ranks, 2 * num_ranks, 3)
    own, total = x[rank].clone(), x.sum(dim=0)
    summed, same = own.clone(), own.clone()
    works: list[Any] = [all_reduce(summed, async_op=True), broadcast(same, async_op=True)]
    results = []
    for start in (reduce_scatter, all_gather, reduce):
        tensor, work = start(own, async_op=True)
        results.append(tensor)
        works.append(work)
    received, work = send_recv(own, [(0, num_ranks - 1)], async_op=True)
    works.append(work)
    for work in works:
        work.wait()
        work.wait()  # once more is harmless
    assert_same(summed, total)
    assert_same(same, x[0])
    assert_same(results[0], total[2 * rank : 2 * rank + 2])
    assert_same(results[1], x.flatten(0, 1))
    assert_same(results[2], total if rank == 0 else torch.zeros_like(total))
    assert_same(received, x[0] if rank == num_ranks - 1 else torch.zeros_like(own))


def check_strides():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = integer_valued(num_ranks, num_ranks * 2, 6)
    total = x.sum(dim=0)
    # Every second column of a wider tensor; and rows against columns, a different layout on each rank.
    gaps = torch.zeros(num_ranks * 2, 12)[:, ::2].copy_(x[rank])
    turned = x[rank].clone() if rank % 2 else x[rank].t().contiguous().t()
    for own in (gaps, turned):
        assert_same(reduce_scatter(own), total[2 * rank : 2 * rank + 2])
        assert_same(all_gather(own), x.flatten(0, 1))
        assert_same(reduce(own), total if rank == 0 else torch.zeros_like(total))
        assert_same(send_recv(own, [(0, num_ranks - 1)]), x[0] if rank == num_ranks - 1 else torch.zeros_like(own))
        for async_op in (False, True):
            own.copy_(x[rank])
            strides = own.stride()
            work = all_reduce(own, async_op=async_op)
            if work is not None:
                work.wait()
            assert_same(own, total)
            work = broadcast(own.copy_(x[rank]), async_op=async_op)
            if work is not None:
                work.wait()
            assert_same(own, x[0])
            assert own.stride() == strides


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


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_async_calls_return_handles(ranks, num_ranks):
    ranks.run(check_async, num_ranks=num_ranks)


def test_strides_do_not_matter(ranks):
    ranks.run(check_strides, num_ranks=2)


def test_record_lists_the_collectives_of_its_block(ranks):
    num_ranks, full_bytes = 2, 2 * 3 * 5 * 2
    outer = [
        Issued("all-reduce", full_bytes),
        Issued("reduce-scatter", full_bytes),
        Issued("all-gather", num_ranks * full_bytes),
        Issued("broadcast", full_bytes),
        Issued("reduce", full_bytes),
        Issued("send-recv", full_bytes),
    ]
    assert ranks.run(issue_everything, num_ranks=num_ranks) == [(outer, outer[1:3])] * num_ranks
