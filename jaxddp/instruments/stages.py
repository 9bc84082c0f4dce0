"""A training at each ZeRO stage: the bytes that a device holds and sends, planned without compiling.

No formula knows the work of any model, but shapes, optimizer and strategy fix what lives across steps and what is sent:

    stage  strategy  parameters  gradients  optimizer state
    0      bucketed  full        full       full
    1      zero1     full        full       shard
    2      zero2     full        shard      shard
    3      zero3     shard       shard      shard

Where the optimizer is not element-wise, stages 1 and 2 are those with ``shard="leaves"``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..network import GB, Network
from ..registry import make_strategy
from ..training.train import Trainer
from ..training.validation import check_batch
from ..tree import split
from . import targets
from .inspect import Training, name_of
from .memory import held_bytes

STRATEGY_NAMES = ("bucketed", "zero1", "zero2", "zero3")  # by ZeRO stage


class StagePlan(NamedTuple):
    """A training at one ZeRO stage; bytes are those of one device.

    Attributes:
        stage: 0 to 3.
        strategy: Its name, and its options are the defaults; with ``by leaves``, ``shard="leaves"``.
        held: Parameters, gradients that outlive their bucket, optimizer state, and their total.
        collectives: Planned ``(kind, bytes)`` of a step, of the full buffers.
        sent_bytes: What a device sends in them, on a ring.
        refused: Why there is no such training; empty if there is.
    """

    stage: int
    strategy: str
    held: dict[str, int]
    collectives: tuple[tuple[str, int], ...] = ()
    sent_bytes: float = 0.0
    refused: str = ""


def plan_stages(training: Training, target: targets.Target, stages: Sequence[int] = range(4)) -> list[StagePlan]:
    """Plans a training at ZeRO stages on a target, by its shapes, with the global batch of all devices.

    Raises:
        ValueError: If no stage takes this training.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch @ params["w"]) ** 2)
        >>> training = Training(loss_fn, optax.adam(0.1), {"w": jnp.zeros((8, 2))}, jnp.zeros((4, 8)))
        >>> [plan.held["total"] for plan in plan_stages(training, targets.target("h100:2"))]  # a counter has 4 bytes
        [260, 196, 164, 260]
    """
    training = training.shapes()
    plans = [_plan(stage, training, target) for stage in stages]
    if all(plan.refused for plan in plans):
        raise ValueError(plans[0].refused)
    return plans


def _plan(stage: int, training: Training, target: targets.Target) -> StagePlan:
    name, refused = STRATEGY_NAMES[stage], ""
    for options in ({}, {"shard": "leaves"}) if stage in (1, 2) else ({},):
        try:
            strategy = make_strategy(name, **options)
            mesh = targets.mesh(target.spec)
            return _plan_of(stage, Trainer(training.loss_fn, training.optimizer, strategy, mesh, **training.options),
                            training)  # fmt: skip
        except ValueError as error:
            refused = refused or str(error)
    return StagePlan(stage, name, {}, refused=refused)


def _plan_of(stage: int, trainer: Trainer, training: Training) -> StagePlan:
    check_batch(training.batch, trainer.num_ranks, trainer.num_microbatches)
    state = trainer.abstract_state(training.params, training.model_state)
    collectives = trainer.planned(state, training.batch)
    memory = held_bytes(trainer.layout(state))
    held = {
        "parameters": memory.parameters,
        "gradients": _gradient_bytes(stage, trainer, training, memory.parameters),
        "optimizer_state": memory.optimizer_state,
    }
    ring, ranks = Network(1.0), range(trainer.num_ranks)
    sent_bytes = sum(ring.transfer_s(*each, ranks) * GB for each in collectives)
    held["total"] = sum(held.values())
    return StagePlan(stage, name_of(trainer.strategy), held, tuple(collectives), sent_bytes)


def _gradient_bytes(stage: int, trainer: Trainer, training: Training, param_bytes: int) -> int:
    """Bytes of the gradients that outlive their bucket; at stage 3 those of a parameter are sharded as it is."""
    given = training.options.get("grad_dtype")
    leaves = jax.tree.leaves(split(training.params, training.options.get("trainable"))[0])
    ranks = trainer.num_ranks if stage == 2 else 1
    num_bytes = sum(-(-leaf.size // ranks) * jnp.dtype(given or leaf.dtype).itemsize for leaf in leaves)
    every = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(training.params))
    return math.ceil(num_bytes * (param_bytes / every if stage == 3 else 1))
