"""Checks of numeric arguments. Every error gives the value and the rule in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np


def check_positive(**values: Any) -> None:
    """Raises ValueError unless all numbers are positive and finite; values are numbers or arrays, by argument name.

    Example:
        >>> check_positive(bytes_per_s=[1e9, -1.0])
        Traceback (most recent call last):
            ...
        ValueError: bytes_per_s (=-1.0) must be a positive finite number
    """
    _check(values, lambda value: (value > 0) & np.isfinite(value), "must be a positive finite number")


def check_not_negative(**values: Any) -> None:
    """Raises ValueError unless all numbers are finite and not negative."""
    _check(values, lambda value: (value >= 0) & np.isfinite(value), "must be a finite number, 0 or more")


def check_count(**values: Any) -> None:
    """Raises ValueError unless all numbers are whole and positive."""
    rule = "must be a whole number, 1 or more"
    _check(values, lambda value: (value >= 1) & np.isfinite(value) & (np.floor(value) == value), rule)


def check_size(**values: Any) -> None:
    """Raises ValueError unless all numbers are whole and not negative."""
    rule = "must be a whole number, 0 or more"
    _check(values, lambda value: (value >= 0) & np.isfinite(value) & (np.floor(value) == value), rule)


def check_choice(options: Collection[Any], **values: Any) -> None:
    """Raises ValueError unless each value is one of the options."""
    for name, value in values.items():
        if isinstance(value, bool) or value not in [*options]:  # True would count as 1
            raise ValueError(f"{name} (={value!r}) must be one of {', '.join(map(str, options))}")


def _check(values: dict[str, Any], is_good: Callable[[Any], Any], rule: str) -> None:
    for name, value in values.items():
        entries = np.asarray(value)
        if entries.dtype.kind not in "iuf" or not entries.size:  # text, booleans, ragged lists
            raise ValueError(f"{name} (={value!r}) {rule}")
        good = np.broadcast_to(is_good(entries), entries.shape)
        if not good.all():
            raise ValueError(f"{name} (={entries[~good].flat[0]}) {rule}")
