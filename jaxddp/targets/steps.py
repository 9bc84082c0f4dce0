"""A trainer's step compiled for a target in the background, as it is and without its communication."""

from __future__ import annotations

from typing import Any

from ..arguments import check_kind
from ..communication.buckets import BucketPlan
from ..strategy import Strategy
from ..training.train import Trainer, TrainState
from .compile import TIMEOUT_S, start_compile_for_target
from .job import Pending
from .meshes import mesh_like, target_like, target_of


def start_compile(trainer: Trainer, state: TrainState, batch: Any, *, timeout_s: float = TIMEOUT_S) -> Pending:
    """Starts what ``trainer.compile`` does on the mesh of a target, so that several programs compile at a time.

    Raises:
        ValueError: If the mesh has devices, or as ``Trainer.compile``.
    """
    check_kind("trainer", trainer, Trainer, "a jaxddp.Trainer")
    if (target := target_of(trainer.mesh)) is None:
        raise ValueError(f"mesh (={trainer.mesh}) must be a target's to compile in the background: use compile")
    function, args, options = trainer.step_function(state, batch)
    return start_compile_for_target(target, function, args, timeout_s=timeout_s, **options)


def start_compile_without_communication(trainer: Trainer, state: TrainState, batch: Any) -> Pending:
    """Starts to compile the step without communication: the baseline of exposed communication.

    Every gradient is taken as equal on all ranks. The program is the same for all strategies: each rank has the full
    parameters and the full optimizer state.

    The trainer is on the mesh of a target, or of devices that are a target's.

    Raises:
        ValueError: If the mesh's devices are of no known chip.
    """
    check_kind("trainer", trainer, Trainer, "a jaxddp.Trainer")
    mesh = mesh_like(trainer.mesh)
    strategy = Strategy("without communication", lambda tensors: BucketPlan(()))
    silent = trainer.with_strategy(strategy, mesh)
    model_state = state.model_state if trainer.has_state else None
    state = silent.abstract_state(trainer.layout(state).whole(), model_state)
    trace = silent.trace(state, batch)
    nothing = BucketPlan((), constants=tuple(tensor.name for tensor in (*trace.tensors, *trace.constants)))
    function, args, options = silent.step_function(state, batch, nothing)
    return start_compile_for_target(target_like(mesh), function, args, **options)
