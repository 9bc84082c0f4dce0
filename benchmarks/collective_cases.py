"""The collectives: their names, inputs, expected results and planned communication.

Rank r contributes the float32 values (i + 17 r) mod 251. Whole numbers make every sum exact, so results are compared
bit for bit. 251 is prime, so no two chunks of a buffer are equal, and no two ranks.
"""

from typing import Any

import numpy as np

from jaxddp.network import GB, bus_factor

PRIMITIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "send_recv")
RINGS = ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce")
NAMES = (*PRIMITIVES, *RINGS)
QUICK_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "ring_all_reduce")

ELEMENT_BYTES = 4
ROOT = 0
PERIOD, SHIFT = 251, 17


def size_of(name: str, asked_bytes: int, num_ranks: int) -> int:
    """Bytes of the full buffer, rounded up to whole values and, where ranks share it, to equal parts.

    Example:
        >>> size_of("all_reduce", 1024, 6), size_of("reduce_scatter", 1024, 6)
        (1024, 1032)
    """
    share = ELEMENT_BYTES * (num_ranks if name.endswith(("reduce_scatter", "all_gather")) else 1)
    return -(-asked_bytes // share) * share


def brought_length(name: str, asked_bytes: int, num_ranks: int) -> int:
    """Elements of a rank's input: the full buffer or, for an all-gather, the rank's part of it."""
    length = size_of(name, asked_bytes, num_ranks) // ELEMENT_BYTES
    return length // num_ranks if name.endswith("all_gather") else length


def options_of(name: str, num_ranks: int) -> dict[str, Any]:
    """Further arguments of a collective: a root, or pairs of each rank and its right-hand neighbour."""
    if name in ("broadcast", "reduce"):
        return {"root": ROOT}
    return {"pairs": [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]} if name == "send_recv" else {}


def rates(name: str, size_bytes: int, seconds: float, num_ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in 10^9 bytes per second; a ring counts as the collective that it implements."""
    kind = name.removeprefix("ring_").replace("send_recv", "collective-permute").replace("_", "-")
    algbw = size_bytes / seconds / GB
    return algbw, algbw * bus_factor(kind, num_ranks)


def plan(name: str, kinds: dict[str, str], size_bytes: int, num_ranks: int) -> list[tuple[str, int]]:
    """Lists the ``(kind, bytes of the full buffer)`` that a collective should issue.

    ``kinds`` has the framework's names of those of ``PRIMITIVES`` that are implemented by others.
    """
    if name not in RINGS:
        return [(kinds.get(name, name.replace("_", "-")), size_bytes)]
    sends = (num_ranks - 1) * (2 if name == "ring_all_reduce" else 1)
    padded_bytes = size_of("reduce_scatter", size_bytes, num_ranks)
    return [(kinds.get("send_recv", "send-recv"), padded_bytes // num_ranks)] * sends


def values(rank: int, length: int) -> np.ndarray:
    """The first ``length`` values of a rank's input."""
    return np.resize(_period(rank), length)


def expected(name: str, rank: int, num_ranks: int, length: int) -> np.ndarray:
    """The expected result of a collective on a rank, for a buffer of ``length`` elements."""
    total, chunk = sum(map(_period, range(num_ranks)), np.zeros(PERIOD, np.float32)), length // num_ranks
    match name.removeprefix("ring_"):
        case "all_reduce":
            return np.resize(total, length)
        case "reduce_scatter":
            return np.resize(np.roll(total, -rank * chunk), chunk)
        case "all_gather":
            return np.concatenate([values(each, chunk) for each in range(num_ranks)])
        case "broadcast":
            return values(ROOT, length)
        case "reduce":
            return np.resize(total, length) if rank == ROOT else np.zeros(length, np.float32)
    assert name == "send_recv", name
    return values(rank - 1 if rank else num_ranks - 1, length)


def num_wrong(result: np.ndarray, wanted: np.ndarray) -> int:
    """Counts wrong values of a result, including missing and superfluous ones."""
    count = min(result.size, wanted.size)
    return int(np.count_nonzero(result[:count] != wanted[:count])) + abs(result.size - wanted.size)


def _period(rank: int) -> np.ndarray:
    return ((np.arange(PERIOD) + SHIFT * rank) % PERIOD).astype(np.float32)
