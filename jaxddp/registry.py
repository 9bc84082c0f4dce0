"""All strategies by name: importing this module imports every file of ``ddp/`` and ``zero/``.

To add a strategy, write one file in either folder with a factory under ``@strategy.register``: the command lines and
the benchmarks find it here.
"""

import importlib
import inspect
import pkgutil
from typing import Any

from . import ddp, zero
from .strategy import STRATEGIES as STRATEGIES
from .strategy import Strategy

# Other strategies follow those of their folder.
_ORDER = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")


def make_strategy(name: str, **options: Any) -> Strategy:
    """Builds a strategy by name.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](**options)


def is_bucketed(name: str) -> bool:
    """Whether a strategy sends all gradients in buckets of a cap: its factory's first parameter is ``bucket_mb``.

    Example:
        >>> [name for name in STRATEGIES if is_bucketed(name)]
        ['bucketed', 'zero1', 'zero2']
    """
    if name not in STRATEGIES:
        return False
    first = next(iter(inspect.signature(STRATEGIES[name]).parameters.values()), None)
    return first is not None and first.name == "bucket_mb" and first.kind is first.POSITIONAL_OR_KEYWORD


def discover() -> None:
    """Registers what is in the folders, and sorts it."""
    for folder in (ddp, zero):
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            if not module.name.endswith("_test"):
                importlib.import_module(module.name)
    found = sorted(STRATEGIES.items(), key=_place)
    STRATEGIES.clear()
    STRATEGIES.update(found)


def _place(strategy: tuple[str, Any]) -> tuple[bool, int]:
    name, factory = strategy
    is_zero = factory.__module__.startswith(f"{zero.__name__}.")
    return is_zero, _ORDER.index(name) if name in _ORDER else len(_ORDER)


discover()
