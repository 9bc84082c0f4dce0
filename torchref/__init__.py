"""The PyTorch twin of jaxddp: the same strategies over torch.distributed."""

from jaxddp.planning.buckets import BucketPlan as BucketPlan
from jaxddp.planning.buckets import TensorSpec as TensorSpec
from jaxddp.planning.buckets import plan_buckets as plan_buckets

from .ddp import BucketedDDP as BucketedDDP
from .ddp import FlatDDP as FlatDDP
from .ddp import NaiveDDP as NaiveDDP
from .ddp import OverlappedDDP as OverlappedDDP
from .loss import Weighted as Weighted
from .strategy import STRATEGIES as STRATEGIES
from .strategy import DataParallel as DataParallel
from .strategy import make_strategy as make_strategy
from .train import Trainer as Trainer
from .zero import FSDP as FSDP
from .zero import ShardedOptimizer as ShardedOptimizer
from .zero import ZeRO1 as ZeRO1
from .zero import ZeRO2 as ZeRO2
