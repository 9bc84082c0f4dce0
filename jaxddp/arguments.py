"""Checks of arguments by their kind: a ValueError of one line in place of an error far from the call."""

import contextlib
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuses a value of another type than ``kinds``, which are ``wanted`` in words."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} (={_short(value)}) must be {wanted}")


def check_optimizer(optimizer: Any) -> None:
    """Refuses what is no optax transformation."""
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ValueError(f"optimizer (={_short(optimizer)}) must be an optax transformation, such as optax.adam(1e-3)")


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """Gives an integer as Python's, NumPy's too; refuses what is none, or one below ``least``. True is none."""
    with contextlib.suppress(TypeError):  # raised for what is no integer, such as an array of a float
        if is_number(value) and (number := operator.index(value)) >= least:
            return number
    wanted = {0: "a non-negative integer", 1: "a positive integer"}.get(least, f"an integer, {least} or more")
    raise ValueError(f"{name} (={_short(value)}) must be {wanted}")


def check_positive(name: str, value: Any) -> None:
    """Refuses what is no positive finite number."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} (={_short(value)}) must be a positive finite number")


def check_leaves(name: str, leaves: Mapping[str, Any]) -> None:
    """Refuses leaves of a tree, by their names, that are no arrays."""
    for leaf_name, leaf in leaves.items():
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"{name} leaf {leaf_name!r} (={_short(leaf)}) must be an array")


def check_root(root: int, num_ranks: int) -> None:
    """Refuses what is not the number of a rank."""
    if root not in range(num_ranks):
        raise ValueError(f"root (={root!r}) must be at least 0 and below num_ranks (={num_ranks}), an integer")


def check_pairs(pairs: Sequence[tuple[int, int]], num_ranks: int) -> None:
    """Refuses pairs, of a rank that sends and one that receives, in which a rank is unknown or does either twice."""
    check_kind("pairs", pairs, Sequence, "a sequence of pairs, (from rank, to rank)")  # iterators end after one pass
    if not all(rank in range(num_ranks) for pair in pairs for rank in pair):
        raise ValueError(f"pairs (={list(pairs)}) must name ranks from 0 to below num_ranks (={num_ranks})")
    if any(len(set(side)) < len(pairs) for side in zip(*pairs, strict=True)):
        raise ValueError(f"pairs (={list(pairs)}) must send at most once from each rank, and to each")


def is_number(value: Any) -> bool:
    """Whether a value is a real number; True, strings and arrays of several elements are none."""
    if isinstance(value, (bool, str, bytes)):
        return False
    return isinstance(value, (int, float)) or (getattr(value, "shape", None) == () and hasattr(value, "__float__"))


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
