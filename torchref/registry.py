"""All strategies by name: importing this module imports those of ``ddp/`` and ``zero/``."""

from typing import Any

from torch import nn

from . import ddp as ddp
from . import zero
from .strategy import STRATEGIES as STRATEGIES
from .strategy import DataParallel


def make_strategy(name: str, module: nn.Module, **options: Any) -> DataParallel:
    """Wraps a module in a strategy by name.

    Args:
        name: A key of ``STRATEGIES``.
        module: What to train.
        **options: For the strategy.

    Returns:
        The wrapper.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    strategy: Any = STRATEGIES[name]
    return strategy(module, **options)


def _sort() -> None:
    """Puts the stages of ZeRO last, whichever folder was imported first."""
    found = sorted(STRATEGIES.items(), key=lambda one: one[1].__module__.startswith(f"{zero.__name__}."))
    STRATEGIES.clear()
    STRATEGIES.update(found)


_sort()
