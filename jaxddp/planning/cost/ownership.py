"""Optimizer state sharded by whole tensors: which rank owns which, and how unevenly that comes out.

ZeRO cuts a flat buffer, so all ranks hold the same. An optimizer that wraps another one can only deal whole tensors:

    by index    tensor i belongs to rank i mod N; tensors of a kind return with a period, so large ones may meet
    greedily    largest first, each to the rank that has least so far; never above 4/3 - 1/(3 N) of the best

References:
    Graham, Bounds on multiprocessing timing anomalies, SIAM Journal on Applied Mathematics 1969.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from .checks import check_choice, check_count, check_not_negative


def owners(tensor_elements: Sequence[int], num_ranks: int, rule: Literal["index", "greedy"] = "index") -> np.ndarray:
    """Deals whole tensors out.

    Args:
        tensor_elements: Elements of each tensor.
        num_ranks: N.
        rule: ``"index"`` or ``"greedy"``.

    Returns:
        The owner of each tensor, ``[tensors]``.

    Raises:
        ValueError: If a number is out of range or the rule is unknown.

    Example:
        >>> owners([5, 1, 5, 1], 2).tolist(), owners([5, 1, 5, 1], 2, "greedy").tolist()
        ([0, 1, 0, 1], [0, 0, 1, 1])
    """
    check_not_negative(tensor_elements=[0, *tensor_elements])
    check_count(num_ranks=num_ranks)
    check_choice(("index", "greedy"), rule=rule)
    if rule == "index":
        return np.arange(len(tensor_elements)) % num_ranks
    found, held = np.empty(len(tensor_elements), int), np.zeros(num_ranks, int)
    for place in sorted(range(len(tensor_elements)), key=lambda place: -tensor_elements[place]):
        found[place] = held.argmin()
        held[found[place]] += tensor_elements[place]
    return found


def owned_bytes(
    tensor_elements: Sequence[int], owner: Sequence[int] | np.ndarray, num_ranks: int, element_bytes: int
) -> np.ndarray:
    """Adds up what each rank owns.

    Args:
        tensor_elements: Elements of each tensor.
        owner: Of each, as ``owners`` gives it.
        num_ranks: N.
        element_bytes: State bytes of an element, such as 8 for two float32 moments.

    Returns:
        Bytes of each rank, ``[num_ranks]``.

    Raises:
        ValueError: If a number is out of range.
    """
    check_count(num_ranks=num_ranks, element_bytes=element_bytes)
    check_not_negative(tensor_elements=[0, *tensor_elements], owner=[0, *owner])
    held = np.zeros(num_ranks, int)
    np.add.at(held, np.asarray(owner, int), np.asarray(tensor_elements, int))
    return held * element_bytes
