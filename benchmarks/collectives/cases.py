"""The collectives that are measured: how they are named and counted, what the ranks bring, and what must come of it.

Rank r brings the float32 values (i + 17 r) mod 251: whole numbers, so that every sum is exact and every result is
right or wrong to the bit; 251 is prime, so that no two chunks of a buffer are alike, and no two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxddp.planning.cost.bandwidth import bandwidths

PRIMITIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "send_recv")
RINGS = ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce")
NAMES = (*PRIMITIVES, *RINGS)
QUICK_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "ring_all_reduce")

ELEMENT_BYTES = 4
ROOT = 0
PERIOD, SHIFT = 251, 17

Segments = list[tuple[np.ndarray, int]]  # a period, and how many values repeat it


def size_of(name: str, asked_bytes: int, num_ranks: int) -> int:
    """Bytes of the full buffer: what was asked for, in whole values and, where the ranks share it, in equal parts.

    Example:
        >>> size_of("all_reduce", 1024, 6), size_of("reduce_scatter", 1024, 6)
        (1024, 1032)
    """
    share = ELEMENT_BYTES * (num_ranks if name.endswith(("reduce_scatter", "all_gather")) else 1)
    return -(-asked_bytes // share) * share


def brought_length(name: str, asked_bytes: int, num_ranks: int) -> int:
    """Elements that a rank brings: the full buffer, or of what is gathered its part."""
    length = size_of(name, asked_bytes, num_ranks) // ELEMENT_BYTES
    return length // num_ranks if name.endswith("all_gather") else length


def options_of(name: str, num_ranks: int) -> dict[str, Any]:
    """The arguments of a collective beside what is sent and where: a root, or every rank's right-hand neighbour."""
    if name in ("broadcast", "reduce"):
        return {"root": ROOT}
    return {"pairs": [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]} if name == "send_recv" else {}


def rates(name: str, size_bytes: int, seconds: float, num_ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth, 10^9 bytes per second; a ring counts as the collective that it carries out."""
    kind = name.removeprefix("ring_").replace("send_recv", "sendrecv")
    algbw, busbw = bandwidths(kind, size_bytes, seconds, num_ranks)
    return float(algbw) / 1e9, float(busbw) / 1e9


def plan(name: str, kinds: dict[str, str], size_bytes: int, num_ranks: int) -> list[tuple[str, int]]:
    """Lists what a collective should issue.

    Args:
        name: One of ``NAMES``.
        kinds: How the framework calls what carries each of ``PRIMITIVES`` out.
        size_bytes: Of the full buffer.
        num_ranks: Their number.

    Returns:
        ``(kind, bytes of the full buffer)`` of each.

    Example:
        >>> plan("ring_all_reduce", {"send_recv": "collective-permute"}, 1024, 2)
        [('collective-permute', 512), ('collective-permute', 512)]
    """
    if name not in RINGS:
        return [(kinds[name], size_bytes)]
    sends = (num_ranks - 1) * (2 if name == "ring_all_reduce" else 1)
    padded_bytes = size_of("reduce_scatter", size_bytes, num_ranks)
    return [(kinds["send_recv"], padded_bytes // num_ranks)] * sends


def values(rank: int, length: int) -> np.ndarray:
    """The input of a rank: the first ``length`` of its values."""
    return _repeat(_period(rank), length)


def expected(name: str, rank: int, num_ranks: int, length: int) -> Segments:
    """The expected result of a collective on a rank, segment by segment, for a buffer of ``length`` elements."""
    total = np.sum([_period(each) for each in range(num_ranks)], axis=0)
    match name.removeprefix("ring_"):
        case "all_reduce":
            return [(total, length)]
        case "reduce_scatter":
            chunk = length // num_ranks
            return [(np.roll(total, -rank * chunk), chunk)]
        case "all_gather":
            return [(_period(each), length // num_ranks) for each in range(num_ranks)]
        case "broadcast":
            return [(_period(ROOT), length)]
        case "reduce":
            return [(total if rank == ROOT else np.zeros_like(total), length)]
        case "send_recv":
            return [(_period(rank - 1 if rank else num_ranks - 1), length)]
    raise AssertionError(f"no collective is called {name!r}")


def num_wrong(result: np.ndarray, segments: Segments) -> int:
    """Counts the values of a result that are not what they must be; those missing or left over are wrong too."""
    wrong, start = 0, 0
    for period, count in segments:
        part = result[start : start + count]
        start += count
        whole = part.size - part.size % PERIOD
        wrong += count - part.size
        wrong += int(np.count_nonzero(part[:whole].reshape(-1, PERIOD) != period))
        wrong += int(np.count_nonzero(part[whole:] != period[: part.size - whole]))
    return wrong + result[start:].size


def check(planned: Sequence[tuple[str, int]], found: Sequence[tuple[str, int]], wrong: int) -> str:
    """``"ok"``, or what is wrong with a collective."""
    if sorted(planned) != sorted(found):
        return f"WRONG: {_in_words(planned)} planned, {_in_words(found)} found"
    return "ok" if wrong == 0 else f"WRONG: {wrong:,} values"


def _period(rank: int) -> np.ndarray:
    return ((np.arange(PERIOD) + SHIFT * rank) % PERIOD).astype(np.float32)


def _repeat(period: np.ndarray, length: int) -> np.ndarray:
    return np.tile(period, -(-length // PERIOD))[:length]


def _in_words(collectives: Sequence[tuple[str, int]]) -> str:
    distinct = sorted(set(collectives))
    each = [f"{collectives.count(one)} {one[0]} of {one[1]:,} bytes" for one in distinct]
    return ", ".join(each) or "none"
