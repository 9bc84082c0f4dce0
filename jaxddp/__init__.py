"""Distributed data parallelism, gradient buckets and ZeRO for JAX.

    plain.py                        every strategy in its shortest form: read it first
    strategy.py layout.py ddp zero  the contract of a strategy; where leaves lie over the ranks; the strategies
    communication                   collectives, packed buffers, hooks, reductions
    training models checkpoint      the trainer, models to train, checkpoints and weights
    mesh.py tree.py loss.py         ranks; names of leaves; what a loss function returns
    processes                       the job of a launcher: joining it, and ending it when a process is lost
    network planning                times of collectives, cost formulas and chips: no framework
    instruments                     look from outside: read compiled programs, compile for absent machines, simulate
    parity                          your own training, step or model beside one device and PyTorch
    cli                             ``python -m jaxddp``

A public name is loaded when it is first used, so importing this package, its planner or ``planning`` imports no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import flax as flax
    from . import network as network
    from . import parity as parity
    from .checkpoint.checkpoints import Checkpoints as Checkpoints
    from .communication import hooks as hooks
    from .communication.buckets import BucketPlan as BucketPlan
    from .communication.buckets import TensorSpec as TensorSpec
    from .communication.buckets import plan_buckets as plan_buckets
    from .ddp import bucketed as bucketed
    from .ddp import flat as flat
    from .ddp import naive as naive
    from .ddp import overlapped as overlapped
    from .instruments import targets as targets
    from .instruments.collectives import collectives as collectives
    from .instruments.inspect import inspect as inspect
    from .instruments.schedule import gradient_collectives as gradient_collectives
    from .instruments.schedule import read_schedule as read_schedule
    from .loss import Mean as Mean
    from .loss import PerExample as PerExample
    from .loss import Sum as Sum
    from .loss import Weighted as Weighted
    from .mesh import data_mesh as data_mesh
    from .mesh import simulate_devices as simulate_devices
    from .network import Network as Network
    from .processes.replicas import ReplicaError as ReplicaError
    from .processes.start import local_rows as local_rows
    from .processes.start import start_process as start_process
    from .registry import STRATEGIES as STRATEGIES
    from .registry import make_strategy as make_strategy
    from .strategy import Strategy as Strategy
    from .training.allocator import keep_freed_memory as keep_freed_memory
    from .training.ema import params_ema as params_ema
    from .training.own_loop import jit as jit
    from .training.own_loop import plan_gradients as plan_gradients
    from .training.own_loop import sync_gradients as sync_gradients
    from .training.own_loop import value_and_grad as value_and_grad
    from .training.shard_optimizer import shard_optimizer as shard_optimizer
    from .training.shard_optimizer import sharded_specs as sharded_specs
    from .training.train import Trainer as Trainer
    from .training.train import TrainState as TrainState
    from .training.train import check_replicas as check_replicas
    from .training.xla import compile_options as compile_options
    from .tree import named_leaves as named_leaves
    from .zero import layer as layer
    from .zero import zero1 as zero1
    from .zero import zero2 as zero2
    from .zero import zero3 as zero3

_NAMES = {
    ".checkpoint.checkpoints": ("Checkpoints",),
    ".network": ("Network",),
    ".communication.buckets": ("BucketPlan", "TensorSpec", "plan_buckets"),
    ".mesh": ("data_mesh", "simulate_devices"),
    ".processes.start": ("local_rows", "start_process"),
    ".tree": ("named_leaves",),
    ".loss": ("Weighted", "Mean", "Sum", "PerExample"),
    ".registry": ("STRATEGIES", "make_strategy"),
    ".strategy": ("Strategy",),
    ".training.own_loop": ("plan_gradients", "sync_gradients", "jit", "value_and_grad"),
    ".ddp": ("naive", "flat", "overlapped", "bucketed"),
    ".zero": ("layer", "zero1", "zero2", "zero3"),
    ".training.shard_optimizer": ("shard_optimizer", "sharded_specs"),
    ".training.train": ("Trainer", "TrainState", "check_replicas"),
    ".processes.replicas": ("ReplicaError",),
    ".training.xla": ("compile_options",),
    ".training.ema": ("params_ema",),
    ".training.allocator": ("keep_freed_memory",),
    ".instruments.collectives": ("collectives",),
    ".instruments.schedule": ("gradient_collectives", "read_schedule"),
    ".instruments.inspect": ("inspect",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names} | {
    "flax": ".flax",
    "hooks": ".communication.hooks",
    "network": ".network",
    "parity": ".parity",
    "targets": ".instruments.targets",
}

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_MODULES[name], __name__)
        value = globals()[name] = getattr(module, name, module)  # a public module has no such name inside
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
