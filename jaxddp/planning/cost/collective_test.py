"""The formulas of the rings, the trees and the chain against messages that are really passed on."""

import math

import numpy as np
import pytest

from jaxddp.planning.cost import collective
from jaxddp.planning.cost.collective import (
    Cost,
    Link,
    alternate_ring_all_reduce,
    best_num_chunks,
    chain_broadcast,
    flat_broadcast,
    halving_doubling_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    root_all_reduce,
    scatter_gather_broadcast,
    tree_all_reduce,
    tree_broadcast,
)
from jaxddp.planning.network import Network

LINK = Link(latency_s=2e-6, bytes_per_s=5e9, reduce_bytes_per_s=3e10)
EVERY = [
    ring_reduce_scatter, ring_all_gather, ring_all_reduce, alternate_ring_all_reduce, recursive_doubling_all_reduce,
    halving_doubling_all_reduce, tree_all_reduce, root_all_reduce, flat_broadcast, tree_broadcast, chain_broadcast,
    scatter_gather_broadcast,
]  # fmt: skip
# Sums of the same terms in another order.
ROUNDING = 1e-12


class Ranks:
    """Buffers of N ranks, and what passing them on costs."""

    def __init__(self, num_ranks, chunk_bytes, *, chunks=None):
        self.n = num_ranks
        self.chunk_bytes = chunk_bytes
        self.buffers = np.arange(num_ranks)[:, None] ** 2 + np.arange(chunks or num_ranks)
        self.sums = self.buffers.sum(axis=0)
        self.seconds = 0.0
        self.sent_bytes = 0.0

    def step(self, chunk_of, reduce):
        """Every rank sends one chunk to the next, at the same time; with ``reduce`` the next adds it."""
        sent = [self.buffers[rank, chunk_of(rank)] for rank in range(self.n)]
        for rank in range(self.n):
            receiver = (rank + 1) % self.n
            place = chunk_of(rank)
            self.buffers[receiver, place] = sent[rank] + reduce * self.buffers[receiver, place]
        self.count(self.chunk_bytes, reduce)

    def count(self, num_bytes, reduce):
        self.seconds += LINK.seconds(1, num_bytes, num_bytes * reduce)
        self.sent_bytes += num_bytes

    @property
    def cost(self):
        return pytest.approx(Cost(self.seconds, self.sent_bytes), rel=ROUNDING)


@pytest.mark.parametrize("num_ranks", range(2, 12))
def test_rings_by_brute_force(num_ranks):
    ranks = Ranks(num_ranks, chunk_bytes=6e6)
    for step in range(num_ranks - 1):
        ranks.step(lambda rank, step=step: (rank - step) % num_ranks, reduce=True)
    for rank in range(num_ranks):
        owned = (rank + 1) % num_ranks
        assert ranks.buffers[rank, owned] == ranks.sums[owned]
    assert ring_reduce_scatter(6e6 * num_ranks, num_ranks, LINK) == ranks.cost
    for step in range(num_ranks - 1):
        ranks.step(lambda rank, step=step: (rank + 1 - step) % num_ranks, reduce=False)
    assert np.array_equal(ranks.buffers, np.tile(ranks.sums, (num_ranks, 1)))
    assert ring_all_reduce(6e6 * num_ranks, num_ranks, LINK) == ranks.cost


@pytest.mark.parametrize("num_ranks", range(2, 12))
def test_the_alternate_ring_by_brute_force(num_ranks):
    """Each rank passes on whole buffers, that it got in the step before, and adds them to its sum."""
    own = [rank**2 + 1 for rank in range(num_ranks)]
    passing, total = list(own), list(own)
    ranks = Ranks(num_ranks, chunk_bytes=0.0)
    for _ in range(num_ranks - 1):
        passing = [passing[rank - 1] for rank in range(num_ranks)]
        total = [sums + got for sums, got in zip(total, passing, strict=True)]
        ranks.count(4e6, reduce=True)
    assert total == [sum(own)] * num_ranks
    assert alternate_ring_all_reduce(4e6, num_ranks, LINK) == ranks.cost


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_halving_and_doubling_by_brute_force(num_ranks):
    size = 8e6
    values = [{chunk: {rank} for chunk in range(num_ranks)} for rank in range(num_ranks)]
    ranks = Ranks(num_ranks, chunk_bytes=size / num_ranks)
    distance = num_ranks // 2
    while distance:  # each keeps the half of its chunks in which its own lies, and its partner sends what it has of it
        sent = [
            {chunk: values[rank ^ distance][chunk] for chunk in values[rank] if not (chunk ^ rank) & distance}
            for rank in range(num_ranks)
        ]
        values = [{c: values[rank][c] | got for c, got in sent[rank].items()} for rank in range(num_ranks)]
        ranks.count(len(sent[0]) * ranks.chunk_bytes, reduce=True)
        distance //= 2
    assert [set(held) for held in values] == [{rank} for rank in range(num_ranks)]
    distance = 1
    while distance < num_ranks:
        ranks.count(len(values[0]) * ranks.chunk_bytes, reduce=False)
        values = [values[rank] | values[rank ^ distance] for rank in range(num_ranks)]
        distance *= 2
    everyone = set(range(num_ranks))
    assert all(set(held) == everyone and all(of == everyone for of in held.values()) for held in values)
    assert halving_doubling_all_reduce(size, num_ranks, LINK) == ranks.cost


@pytest.mark.parametrize("num_ranks", range(2, 20))
def test_a_binomial_tree_by_brute_force(num_ranks):
    having, rounds = 1, 0
    while having < num_ranks:
        having, rounds = 2 * having, rounds + 1
    assert tree_broadcast(3e6, num_ranks, LINK).seconds == pytest.approx(LINK.seconds(rounds, rounds * 3e6))


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_a_chain_by_brute_force(num_ranks):
    size, num_chunks = 4e6, 5
    arrived = np.zeros((num_ranks, num_chunks))  # when each rank has each chunk; the root has all at once
    send_s = float(LINK.seconds(1, size / num_chunks))
    for rank in range(1, num_ranks):
        free = 0.0
        for chunk in range(num_chunks):
            free = max(free, arrived[rank - 1, chunk]) + send_s
            arrived[rank, chunk] = free
    cost = chain_broadcast(size, num_ranks, LINK, num_chunks)
    assert cost.seconds == pytest.approx(arrived.max(), rel=ROUNDING)
    best = min(chain_broadcast(size, num_ranks, LINK, chunks).seconds for chunks in range(1, 400))
    assert chain_broadcast(size, num_ranks, LINK).seconds == best
    assert best_num_chunks(size, num_ranks, LINK) < 399


@pytest.mark.parametrize("cost", EVERY)
def test_arrays_give_what_their_entries_give_and_one_rank_costs_nothing(cost):
    sizes, counts = np.array([[1e3], [1e6]]), np.array([1, 2, 8])
    table = cost(sizes, counts, LINK)
    for row, size in enumerate(sizes[:, 0]):
        for column, count in enumerate(counts):
            one = cost(size, count, LINK)
            sent = np.broadcast_to(table.sent_bytes, table.seconds.shape)
            assert (one.seconds, one.sent_bytes) == (table.seconds[row, column], sent[row, column])
    assert np.all(table.seconds[:, 0] == 0)


@pytest.mark.parametrize("cost", EVERY)
def test_bad_input(cost):
    bad = {(-1.0, 2): "num_bytes (=-1.0)", (1.0, 0): "num_ranks (=0)", (1.0, 2.5): "num_ranks (=2.5)"}
    for arguments, said in bad.items():
        with pytest.raises(ValueError) as raised:
            cost(*arguments, LINK)
        assert str(raised.value).startswith(f"{said} must be a ")


def test_bad_links_and_counts_that_cannot_be_halved():
    for bad in ((-1, 1), (0, 0), (0, math.inf), (0, 1, 0)):
        with pytest.raises(ValueError, match=r"^\w+ \(=[-\w.]+\) must be a (positive )?finite number"):
            Link(*bad)
    for cost in (recursive_doubling_all_reduce, halving_doubling_all_reduce):
        with pytest.raises(ValueError, match=r"^num_ranks \(=6\) must be a power of two for halving and doubling$"):
            cost(1e6, [4, 6], LINK)
    with pytest.raises(ValueError, match=r"^latency_s \(=0\) must be a positive finite number$"):
        best_num_chunks(1e6, 4, Link(0, 1e9))


def test_a_network_is_a_ring_whose_latency_is_given_by_the_call():
    network = Network(gb_per_s=5, latency_us=28)
    link = Link(latency_s=28e-6 / 14, bytes_per_s=5e9)
    for kind, cost in (("all-reduce", ring_all_reduce), ("reduce-scatter", ring_reduce_scatter)):
        assert cost(1e8, 8, link).seconds == pytest.approx(network.seconds(kind, 1e8, range(8)), rel=ROUNDING)


def test_every_formula_of_the_file_is_tested():
    kinds = ("reduce", "gather", "scatter", "broadcast")
    assert {value for name, value in vars(collective).items() if name.endswith(kinds)} == set(EVERY)
