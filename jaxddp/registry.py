"""All strategies by name; a new one is a factory in its own file, and a name here."""

from collections.abc import Callable
from typing import Any

from .ddp import bucketed, flat, naive, overlapped
from .strategy import Strategy
from .zero import zero1, zero2, zero3

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    factory.__name__: factory for factory in (naive, flat, overlapped, bucketed, zero1, zero2, zero3)
}

BUCKETED = ("bucketed", "zero1", "zero2")  # send all gradients in buckets of a cap, ``bucket_mb``


def make_strategy(name: str, **options: Any) -> Strategy:
    """Builds a strategy by name; a ValueError if there is none of it."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](**options)
