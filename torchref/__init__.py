"""The PyTorch twin of jaxddp: the same strategies over torch.distributed, in files of the same names.

Read plain.py first, which has every strategy in its shortest form, then strategy.py.
"""

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
