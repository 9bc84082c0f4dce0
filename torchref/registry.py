"""All strategies by name, for command lines and benchmarks as well. To add one, write a file of it and name it here."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from .strategy import DataParallel
from .zero import FSDP, ZeRO1, ZeRO2

STRATEGIES: dict[str, type[DataParallel]] = {
    "naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP, "bucketed": BucketedDDP,
    "zero1": ZeRO1, "zero2": ZeRO2, "zero3": FSDP,
}  # fmt: skip


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
