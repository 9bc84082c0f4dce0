"""All strategies by name."""

from typing import Any

from torch import nn

from .ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from .strategy import DataParallel
from .zero import FSDP, ZeRO1, ZeRO2

STRATEGIES: dict[str, type[DataParallel]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "zero1": ZeRO1,
    "zero2": ZeRO2,
    "zero3": FSDP,
}


def make_strategy(name: str, module: nn.Module, **options: Any) -> DataParallel:
    """Wraps a module in a strategy by its name in ``STRATEGIES``; the options are the strategy's.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    strategy: Any = STRATEGIES[name]
    return strategy(module, **options)
