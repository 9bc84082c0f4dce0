"""All strategies by name; a new one is a factory in its own file, and a line here."""

import inspect
from collections.abc import Callable
from typing import Any

from .ddp import bucketed, flat, naive, overlapped
from .strategy import Strategy
from .zero import zero1, zero2, zero3

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    factory.__name__: factory for factory in (naive, flat, overlapped, bucketed, zero1, zero2, zero3)
}


def make_strategy(name: str, **options: Any) -> Strategy:
    """Builds a strategy by name; a ValueError if there is none of it."""
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](**options)


def is_bucketed(name: str) -> bool:
    """Whether a strategy sends all gradients in buckets of a cap: its factory's first parameter is ``bucket_mb``."""
    takes = inspect.signature(STRATEGIES[name]).parameters.values() if name in STRATEGIES else ()
    return [(one.name, one.kind) for one in takes][:1] == [("bucket_mb", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
