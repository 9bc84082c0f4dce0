"""All strategies by name: importing this module imports ``ddp.py`` and every file of ``zero/``.

To add a strategy, write one file in that folder with a class under ``@strategy.register(name)``: the command line and
the benchmarks find it here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from jaxddp.discovery import discover

from . import ddp as ddp, zero
from .strategy import STRATEGIES as STRATEGIES, DataParallel


def make_strategy(name: str, module: nn.Module, **options: Any) -> DataParallel:
    """Wraps a module in a strategy by its name, with the strategy's options; a ValueError if there is none of it."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    strategy: Any = STRATEGIES[name]
    return strategy(module, **options)


def make_training(
    name: str, module: nn.Module, optimizer_cls: Callable[..., Any], options: Mapping[str, Any], **settings: Any
) -> tuple[DataParallel, Any]:
    """Makes a wrapper, with options, and what takes its steps: an optimizer of these settings, or the wrapper."""
    if name in STRATEGIES and STRATEGIES[name].owns_optimizer:
        net = make_strategy(name, module, optimizer_cls=optimizer_cls, **options, **settings)
        return net, net
    net = make_strategy(name, module, **options)
    return net, optimizer_cls(net.parameters(), **settings)


discover(STRATEGIES, zero)
