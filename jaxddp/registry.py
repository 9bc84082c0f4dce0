"""All strategies by name, for command lines and benchmarks as well. To add one, write a file of it and name it here."""

from typing import Any

from .ddp import bucketed, flat, naive, overlapped
from .strategy import Strategy
from .zero import zero1, zero2, zero3

STRATEGIES = {one.__name__: one for one in (naive, flat, overlapped, bucketed, zero1, zero2, zero3)}


def make_strategy(name: str, **options: Any) -> Strategy:
    """Builds a strategy by name; a ValueError if there is none of it."""
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](**options)


def is_bucketed(name: str) -> bool:
    """Whether a strategy sends all gradients in buckets of a cap, its ``bucket_mb``."""
    return name in ("bucketed", "zero1", "zero2")
