"""Distributed data parallelism, gradient buckets and ZeRO for JAX."""

from . import quiet_start as quiet_start  # before all that imports JAX
from . import targets as targets
from .communication.buckets import BucketPlan as BucketPlan
from .communication.buckets import TensorSpec as TensorSpec
from .communication.buckets import plan_buckets as plan_buckets
from .compiled.schedule import gradient_collectives as gradient_collectives
from .compiled.schedule import read_schedule as read_schedule
from .ddp import bucketed as bucketed
from .ddp import flat as flat
from .ddp import naive as naive
from .ddp import overlapped as overlapped
from .loss import Weighted as Weighted
from .mesh import data_mesh as data_mesh
from .mesh import simulate_devices as simulate_devices
from .mesh import start_process as start_process
from .simulation.network import Network as Network
from .strategy import STRATEGIES as STRATEGIES
from .strategy import Strategy as Strategy
from .strategy import make_strategy as make_strategy
from .strategy import plan_gradients as plan_gradients
from .strategy import sync_gradients as sync_gradients
from .training.allocator import keep_freed_memory as keep_freed_memory
from .training.train import Trainer as Trainer
from .training.train import TrainState as TrainState
from .training.xla import compile_options as compile_options
from .training.xla import configure as configure
from .tree import named_leaves as named_leaves
from .zero import layer as layer
from .zero import zero1 as zero1
from .zero import zero2 as zero2
from .zero import zero3 as zero3
from .zero.clipping import clip_by_global_norm as clip_by_global_norm
from .zero.shard_optimizer import shard_optimizer as shard_optimizer
from .zero.shard_optimizer import sharded_specs as sharded_specs
