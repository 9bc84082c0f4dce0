"""The PyTorch twin of jaxddp: the same strategies over torch.distributed, in files of the same names.

Read plain.py first, which has every strategy in its shortest form, then strategy.py.
"""

from jaxddp.communication.buckets import (
    BucketPlan as BucketPlan,
    TensorSpec as TensorSpec,
    plan_buckets as plan_buckets,
)

from .checkpoint import Checkpoints as Checkpoints
from .ddp import BucketedDDP as BucketedDDP, FlatDDP as FlatDDP, NaiveDDP as NaiveDDP, OverlappedDDP as OverlappedDDP
from .loss import Weighted as Weighted
from .registry import STRATEGIES as STRATEGIES, make_strategy as make_strategy
from .replicas import check_replicas as check_replicas
from .strategy import DataParallel as DataParallel
from .train import Trainer as Trainer
from .zero import FSDP as FSDP, ShardedOptimizer as ShardedOptimizer, ZeRO1 as ZeRO1, ZeRO2 as ZeRO2
