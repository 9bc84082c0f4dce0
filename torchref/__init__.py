"""The PyTorch twin of jaxddp: the same strategies over torch.distributed.

plain.py                  every strategy in its shortest form: read it first
strategy.py               the contract, the registry, and the engine that carries out a bucket plan
replicated.py, ddp/       strategies whose gradients are all-reduced
zero/                     strategies that shard the training state
communication/            collectives, buckets, shards, compression
train.py, loss.py         the trainer; what a loss function returns
loss_scale.py             the scale of a loss in float16, equal on all ranks
clipping.py, hooks.py     the global norm of shards; what a deleted wrapper leaves behind
launch.py                 starts ranks as processes, or joins those of ``torchrun``
models/, interop.py       models to train; parameters to and from NumPy
cli/                      ``python -m torchref``
walkthrough.py            what two ranks hold under ZeRO, phase by phase
"""

from jaxddp.communication.buckets import BucketPlan as BucketPlan
from jaxddp.communication.buckets import TensorSpec as TensorSpec
from jaxddp.communication.buckets import plan_buckets as plan_buckets

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
from .zero import ZeROOptimizer as ZeROOptimizer
