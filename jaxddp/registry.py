"""All strategies by name: importing this module imports ``ddp.py`` and every file of ``zero/``.

A new strategy is one file in that folder, with a factory under ``@strategy.register``.
"""

import inspect
from typing import Any

from . import ddp as ddp, zero
from .discovery import discover
from .strategy import STRATEGIES as STRATEGIES, Strategy


def make_strategy(name: str, **options: Any) -> Strategy:
    """Builds a strategy by name; a ValueError if there is none of it."""
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](**options)


def is_bucketed(name: str) -> bool:
    """Whether a strategy sends all gradients in buckets of a cap: its factory's first parameter is ``bucket_mb``."""
    takes = inspect.signature(STRATEGIES[name]).parameters.values() if name in STRATEGIES else ()
    return [(one.name, one.kind) for one in takes][:1] == [("bucket_mb", inspect.Parameter.POSITIONAL_OR_KEYWORD)]


discover(STRATEGIES, zero)
