"""Each strategy's step, compiled and read, and executed where a device counts allocations.

Strategies share no process, so that none is charged for another's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

import jaxddp
from jaxddp import targets
from jaxddp.instruments.memory import StepMemory, allocated_bytes, padding_share, step_memory
from jaxddp.models import SIZES, TransformerConfig, abstract
from jaxddp.plugins import devices
from torchref.launch import launch

from ..harness.ranks import prepare_jax

CPU = "cpu"
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class MemorySetup:
    """What is compiled, for a target or ``cpu:N``, with a global batch of ``batch_size`` sequences."""

    model: str
    target: str
    num_ranks: int
    strategies: tuple[str, ...]
    batch_size: int

    @property
    def config(self) -> TransformerConfig:
        """The model's sizes."""
        return SIZES[self.model]

    @property
    def is_here(self) -> bool:
        """Whether it is compiled for this machine."""
        return self.target.startswith(f"{CPU}:")


class Allocation(NamedTuple):
    """An allocator's figures, in bytes of one device.

    Attributes:
        after_init: In use, less what was in use before.
        peak: The most in use during two steps; the allocator cannot tell the moments of a step apart.
        after_step: In use after them.
    """

    device: str
    num_ranks: int
    after_init: int
    peak: int
    after_step: int


def read(setup: MemorySetup, name: str) -> tuple[StepMemory, float]:
    """Compiles a strategy's step: its memory, and by how much the shards of its state exceed 1/N.

    Raises:
        ValueError: If the step cannot be compiled.
    """
    if setup.is_here:
        return launch(_read_here, setup, name, num_ranks=1, prepare=prepare_jax, timeout_s=TIMEOUT_S)[0]
    trainer, state, batch = _trainer(setup, name, targets.mesh(setup.target))
    program = targets.start_compile(trainer, state, batch).result()
    return step_memory(program, state), padding_share(trainer.layout(state))


def allocate(setup: MemorySetup, name: str) -> Allocation | str:
    """Takes two steps on this machine's accelerators; returns the first one's figures, or why there are none."""
    return launch(_allocate_here, setup, name, num_ranks=1, prepare=prepare_jax, timeout_s=TIMEOUT_S)[0]


def _read_here(setup: MemorySetup, name: str) -> tuple[StepMemory, float]:
    jaxddp.simulate_devices(setup.num_ranks)
    trainer, state, batch = _trainer(setup, name, jaxddp.data_mesh(setup.num_ranks))
    return step_memory(trainer.compile(state, batch), state), padding_share(trainer.layout(state))


def _allocate_here(setup: MemorySetup, name: str) -> Allocation | str:
    first, *others = devices()
    before = allocated_bytes(first)
    if before is None:
        return f"{first.platform} devices count no allocations"
    num_ranks = min(setup.num_ranks, 1 + len(others))
    trainer, described, batch = _trainer(setup, name, jaxddp.data_mesh(num_ranks))
    state = trainer.init(_zeros(trainer.layout(described).whole()))
    made = allocated_bytes(first)
    for _ in range(2):
        state, _ = jax.block_until_ready(trainer.step(state, _zeros(batch)))
    after = allocated_bytes(first)
    assert made is not None and after is not None
    start = before.in_use_bytes
    return Allocation(
        first.device_kind, num_ranks, made.in_use_bytes - start, after.peak_bytes - start, after.in_use_bytes - start
    )


def _trainer(setup: MemorySetup, name: str, mesh: Mesh | AbstractMesh) -> tuple[jaxddp.Trainer, jaxddp.TrainState, Any]:
    loss_fn, params = abstract(setup.model, layer=jaxddp.layer)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), jaxddp.make_strategy(name), mesh)
    sequences = setup.batch_size // setup.num_ranks * trainer.num_ranks
    tokens = jax.ShapeDtypeStruct((sequences, setup.config.context), jnp.int32)
    return trainer, trainer.abstract_state(params), {"tokens": tokens, "targets": tokens}


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
