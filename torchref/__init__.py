"""The PyTorch twin of jaxddp: the same strategies over torch.distributed, in files of the same names.

Read plain.py first, which has every strategy in its shortest form, then strategy.py. A public name is loaded when it is
first used, so importing this package imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxddp.communication.buckets import BucketPlan as BucketPlan
    from jaxddp.communication.buckets import TensorSpec as TensorSpec
    from jaxddp.communication.buckets import plan_buckets as plan_buckets

    from .checkpoint import Checkpoints as Checkpoints
    from .ddp import BucketedDDP as BucketedDDP
    from .ddp import FlatDDP as FlatDDP
    from .ddp import NaiveDDP as NaiveDDP
    from .ddp import OverlappedDDP as OverlappedDDP
    from .loss import Weighted as Weighted
    from .registry import STRATEGIES as STRATEGIES
    from .registry import make_strategy as make_strategy
    from .replicas import check_replicas as check_replicas
    from .strategy import DataParallel as DataParallel
    from .train import Trainer as Trainer
    from .zero import FSDP as FSDP
    from .zero import ShardedOptimizer as ShardedOptimizer
    from .zero import ZeRO1 as ZeRO1
    from .zero import ZeRO2 as ZeRO2


_NAMES = {
    "jaxddp.communication.buckets": ("BucketPlan", "TensorSpec", "plan_buckets"),
    ".checkpoint": ("Checkpoints",),
    ".ddp": ("BucketedDDP", "FlatDDP", "NaiveDDP", "OverlappedDDP"),
    ".loss": ("Weighted",),
    ".registry": ("STRATEGIES", "make_strategy"),
    ".replicas": ("check_replicas",),
    ".strategy": ("DataParallel",),
    ".train": ("Trainer",),
    ".zero": ("FSDP", "ShardedOptimizer", "ZeRO1", "ZeRO2"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
