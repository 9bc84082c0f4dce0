"""All strategies by name: importing this module imports every file of ``ddp/`` and ``zero/``.

To add a strategy, write one file in either folder with a class under ``@strategy.register(name)``: the command line and
the benchmarks find it here.
"""

import importlib
import pkgutil
from typing import Any

from torch import nn

from . import ddp, zero
from .strategy import STRATEGIES as STRATEGIES
from .strategy import DataParallel

# Other strategies follow those of their folder.
_ORDER = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")


def make_strategy(name: str, module: nn.Module, **options: Any) -> DataParallel:
    """Wraps a module in a strategy by its name in ``STRATEGIES``; the options are the strategy's.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    strategy: Any = STRATEGIES[name]
    return strategy(module, **options)


def discover() -> None:
    """Registers what is in the folders, and sorts it."""
    for folder in (ddp, zero):
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            if not module.name.endswith("_test"):
                importlib.import_module(module.name)
    found = sorted(STRATEGIES.items(), key=_place)
    STRATEGIES.clear()
    STRATEGIES.update(found)


def _place(strategy: tuple[str, type[DataParallel]]) -> tuple[bool, int]:
    name, wrapper = strategy
    is_zero = wrapper.__module__.startswith(f"{zero.__name__}.")
    return is_zero, _ORDER.index(name) if name in _ORDER else len(_ORDER)


discover()
