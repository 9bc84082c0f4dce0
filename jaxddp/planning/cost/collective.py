"""What a collective costs: seconds and bytes sent, by algorithm, in the alpha-beta model.

A message of m bytes takes ``a + m b``, and reducing it ``m g`` more: a is the latency, b = 1/W the seconds per byte
that a rank can send, g those per byte that it can reduce. Ranks send at the same time, each to one other. For N ranks
and S bytes of the whole buffer:

    operation                          seconds                                                 sent by a rank
    ring reduce-scatter                (N-1) a + (N-1)/N S (b + g)                             (N-1)/N S
    ring all-gather                    (N-1) a + (N-1)/N S b                                   (N-1)/N S
    ring all-reduce                    2 (N-1) a + 2 (N-1)/N S b + (N-1)/N S g                 2 (N-1)/N S
    alternate ring all-reduce          (N-1) a + (N-1) S (b + g)                               (N-1) S
    recursive doubling all-reduce      log2 N (a + S b + S g)                                  log2 N S
    halving and doubling all-reduce    2 log2 N a + 2 (N-1)/N S b + (N-1)/N S g                2 (N-1)/N S
    double binary tree all-reduce      2 log2 N a + 2 S b             (many chunks)            2 S
    all-reduce through a root          2 (N-1) (a + S b) + (N-1) S g                           (N-1) S, the root
    broadcast, flat                    (N-1) (a + S b)                                         (N-1) S, the root
    broadcast, binomial tree           ceil(log2 N) (a + S b)                                  ceil(log2 N) S, the root
    broadcast, chain of k chunks       (N-2+k) (a + S b / k)                                   S
    broadcast, scatter and all-gather  (ceil(log2 N) + N-1) a + 2 (N-1)/N S b                  2 (N-1)/N S at most

A ring cuts the buffer into N chunks and sends each over N-1 links, once to reduce and once to gather; the alternate
ring passes whole buffers on instead, N/2 times the bytes. Halving sends half the buffer to a partner, then a quarter,
...: S/2 + S/4 + ... = (N-1)/N S in log2 N messages, and doubling does it backwards. A chain of N ranks is N-1 links
deep, so the last of k chunks arrives after N-2+k messages, least at k = sqrt((N-2) S b / a). A reduce is the mirror
image of a broadcast, and reduces on every hop.

References:
    Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005.
    Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .checks import check_count, check_not_negative, check_positive


class Cost(NamedTuple):
    """What a collective costs.

    Attributes:
        seconds: From its start to the end of its last rank.
        sent_bytes: That one rank sends: each rank of a symmetric algorithm, else the one that sends most.
    """

    seconds: Any
    sent_bytes: Any


@dataclass(frozen=True)
class Link:
    """The three numbers of the model.

    Attributes:
        latency_s: a, seconds per message.
        bytes_per_s: W = 1/b, bytes per second that a rank can send while it receives as many.
        reduce_bytes_per_s: 1/g, bytes per second that a rank can add; None if that takes no time.

    Raises:
        ValueError: If the latency is negative, or a speed is not a positive finite number.
    """

    latency_s: float
    bytes_per_s: float
    reduce_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_not_negative(latency_s=self.latency_s)
        check_positive(bytes_per_s=self.bytes_per_s)
        if self.reduce_bytes_per_s is not None:
            check_positive(reduce_bytes_per_s=self.reduce_bytes_per_s)

    def seconds(self, messages: Any, sent_bytes: Any, reduced_bytes: Any = 0.0) -> Any:
        """Adds up messages one after the other, the bytes in them and those that are reduced."""
        reducing = 0.0 if self.reduce_bytes_per_s is None else reduced_bytes / self.reduce_bytes_per_s
        return messages * self.latency_s + sent_bytes / self.bytes_per_s + reducing


def ring_reduce_scatter(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """N-1 steps, in each of which every rank passes a chunk on and adds the one that it got.

    Args:
        num_bytes: S, bytes of the whole buffer; a number or an array, and so everywhere in this file.
        num_ranks: N.
        link: The network.

    Returns:
        The cost, of the shape that the arguments broadcast to.

    Raises:
        ValueError: If the bytes are negative or ``num_ranks`` is not a whole number, 1 or more; so everywhere here.

    Example:
        >>> round(float(ring_reduce_scatter(8e6, 4, Link(latency_s=1e-5, bytes_per_s=1e9)).seconds), 6)
        0.00603
    """
    size, n = _checked(num_bytes, num_ranks)
    sent = (n - 1) / n * size
    return Cost(link.seconds(n - 1, sent, sent), sent)


def ring_all_gather(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """N-1 steps, in each of which every rank passes a chunk on."""
    size, n = _checked(num_bytes, num_ranks)
    sent = (n - 1) / n * size
    return Cost(link.seconds(n - 1, sent), sent)


def ring_all_reduce(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """A reduce-scatter and an all-gather."""
    scattered, gathered = (ring(num_bytes, num_ranks, link) for ring in (ring_reduce_scatter, ring_all_gather))
    return Cost(scattered.seconds + gathered.seconds, scattered.sent_bytes + gathered.sent_bytes)


def alternate_ring_all_reduce(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """N-1 steps, in each of which every rank passes a whole buffer on and adds the one that it got."""
    size, n = _checked(num_bytes, num_ranks)
    sent = (n - 1) * size
    return Cost(link.seconds(n - 1, sent, sent), sent)


def recursive_doubling_all_reduce(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """log2 N steps, in each of which partners twice as far apart swap whole buffers; N must be a power of two."""
    size, n = _checked(num_bytes, num_ranks)
    rounds = _log2_of_power(n)
    return Cost(link.seconds(rounds, rounds * size, rounds * size), rounds * size)


def halving_doubling_all_reduce(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """A reduce-scatter by halves and an all-gather by doubles; N must be a power of two."""
    size, n = _checked(num_bytes, num_ranks)
    scattered = (n - 1) / n * size
    return Cost(link.seconds(2 * _log2_of_power(n), 2 * scattered, scattered), 2 * scattered)


def tree_all_reduce(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """Up and down two binary trees at once, half the buffer each, cut into chunks fine enough to fill them."""
    size, n = _checked(num_bytes, num_ranks)
    sent = 2 * size * (n > 1)
    return Cost(link.seconds(2 * np.log2(n), sent), sent)


def root_all_reduce(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """Everything to one rank and back, one rank after the other."""
    size, n = _checked(num_bytes, num_ranks)
    sent = (n - 1) * size
    return Cost(link.seconds(2 * (n - 1), 2 * sent, sent), sent)


def flat_broadcast(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """The root sends to one rank after the other."""
    size, n = _checked(num_bytes, num_ranks)
    return Cost(link.seconds(n - 1, (n - 1) * size), (n - 1) * size)


def tree_broadcast(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """Whoever has the buffer sends it to someone who has not: a binomial tree."""
    size, n = _checked(num_bytes, num_ranks)
    rounds = np.ceil(np.log2(n))
    return Cost(link.seconds(rounds, rounds * size), rounds * size)


def chain_broadcast(num_bytes: Any, num_ranks: Any, link: Link, num_chunks: Any = None) -> Cost:
    """Every rank passes chunks on to the next; ``num_chunks`` is the best whole number when None."""
    size, n = _checked(num_bytes, num_ranks)
    if num_chunks is None:
        below = np.maximum(1, np.floor(best_num_chunks(size, n, link)))
        costs = [chain_broadcast(size, n, link, chunks).seconds for chunks in (below, below + 1)]
        return Cost(np.minimum(*costs), size * (n > 1))
    check_count(num_chunks=num_chunks)
    messages = n - 2 + np.asarray(num_chunks)
    return Cost(link.seconds(messages, messages * size / num_chunks) * (n > 1), size * (n > 1))


def best_num_chunks(num_bytes: Any, num_ranks: Any, link: Link) -> Any:
    """Gives the k that makes ``(N-2+k) (a + S b / k)`` least, not rounded: sqrt((N-2) S b / a), where a is not 0."""
    size, n = _checked(num_bytes, num_ranks)
    check_positive(latency_s=link.latency_s)
    return np.sqrt(np.maximum(0, n - 2) * size / link.bytes_per_s / link.latency_s)


def scatter_gather_broadcast(num_bytes: Any, num_ranks: Any, link: Link) -> Cost:
    """The root scatters the buffer down a tree, and a ring gathers it everywhere."""
    size, n = _checked(num_bytes, num_ranks)
    sent = 2 * (n - 1) / n * size
    return Cost(link.seconds(np.ceil(np.log2(n)) + n - 1, sent), sent)


def _checked(num_bytes: Any, num_ranks: Any) -> tuple[Any, Any]:
    check_not_negative(num_bytes=num_bytes)
    check_count(num_ranks=num_ranks)
    return np.asarray(num_bytes, float), np.asarray(num_ranks, float)


def _log2_of_power(num_ranks: Any) -> Any:
    rounds = np.log2(num_ranks)
    if not (odd := np.floor(rounds) != rounds).any():
        return rounds
    raise ValueError(f"num_ranks (={num_ranks[odd].flat[0]:g}) must be a power of two for halving and doubling")
