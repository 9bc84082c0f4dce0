"""Distributed data parallelism, gradient buckets and ZeRO for JAX.

    plain.py                        every strategy in its shortest form: read it first
    strategy.py ddp.py zero         the contract of a strategy; four of full parameters; those that shard
    communication training          collectives, packed buffers, hooks, reductions; the trainer
    checkpoint processes            checkpoints and weights; joining a job, and ending it when a process is lost
    instruments network planning    read, compile for absent machines, simulate; times and costs, without a framework
    parity cli                      your own training beside one device and PyTorch; ``python -m jaxddp``

A public name is loaded when it is first used, so importing this package or its planner imports no JAX.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import flax as flax, network as network, parity as parity
    from .checkpoint.checkpoints import Checkpoints as Checkpoints
    from .communication import hooks as hooks
    from .communication.buckets import BucketPlan as BucketPlan, TensorSpec as TensorSpec, plan_buckets as plan_buckets
    from .ddp import bucketed as bucketed, flat as flat, naive as naive, overlapped as overlapped
    from .instruments import targets as targets
    from .instruments.collectives import collectives as collectives
    from .instruments.inspect import inspect as inspect
    from .instruments.schedule import gradient_collectives as gradient_collectives, read_schedule as read_schedule
    from .loss import Mean as Mean, PerExample as PerExample, Sum as Sum, Weighted as Weighted
    from .mesh import data_mesh as data_mesh, simulate_devices as simulate_devices
    from .network import Network as Network
    from .processes.roll_call import ReplicaError as ReplicaError
    from .processes.start import local_rows as local_rows, start_process as start_process
    from .registry import STRATEGIES as STRATEGIES, make_strategy as make_strategy
    from .strategy import Strategy as Strategy
    from .training.allocator import keep_freed_memory as keep_freed_memory
    from .training.ema import params_ema as params_ema
    from .training.own_loop import (
        jit as jit,
        plan_gradients as plan_gradients,
        shard_optimizer as shard_optimizer,
        sharded_specs as sharded_specs,
        sync_gradients as sync_gradients,
        value_and_grad as value_and_grad,
    )
    from .training.replicas import check_replicas as check_replicas
    from .training.train import Trainer as Trainer, TrainState as TrainState
    from .training.xla import compile_options as compile_options
    from .tree import named_leaves as named_leaves
    from .zero import layer as layer, zero1 as zero1, zero2 as zero2, zero3 as zero3
else:  # type checkers would accept any name
    # The imports above are the one list of names and of where they are.
    _MODULES = {
        alias.name: f".{node.module}" if node.module else ""
        for node in ast.walk(ast.parse(Path(__file__).read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        path = _MODULES[name]
        module = import_module(path, __name__) if path else None
        value = getattr(module, name) if hasattr(module, name) else import_module(f"{path}.{name}", __name__)
        return globals().setdefault(name, value)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
