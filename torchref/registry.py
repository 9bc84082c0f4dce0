"""All strategies by name: importing this module imports every file of ``ddp/`` and ``zero/``.

To add a strategy, write one file in either folder with a class under ``@strategy.register(name)``: the command line and
the benchmarks find it here.
"""

from typing import Any

from torch import nn

from jaxddp.discovery import discover

from . import ddp, zero
from .strategy import STRATEGIES as STRATEGIES
from .strategy import DataParallel


def make_strategy(name: str, module: nn.Module, **options: Any) -> DataParallel:
    """Wraps a module in a strategy by its name in ``STRATEGIES``; the options are the strategy's.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    strategy: Any = STRATEGIES[name]
    return strategy(module, **options)


discover(STRATEGIES, ddp, zero)
