"""Memory of each device by component: of a training state, by layout and formula, and of a compiled step.

    after init         parameters, optimizer state and scalars: the state, which lives across steps
    before the update  the state, the batch, and the peak of temporaries until the backward ends
    after the step     the state, the batch, and the peak of temporaries after that

There are three sources. The **layout** of a state gives the bytes of every leaf on a device, and the **formula**
(``planning/cost/memory.py``) must match it to the byte. The **compiled step** takes the state as arguments, with the
same bytes; its temporaries follow from the schedule (``liveness.py``). The **allocator** of a device reports what is in
use, for whatever purpose.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from ..communication.sharding import Cut
from ..planning.cost.memory import FP32, Accumulate, PerParameter, StateBytes, exact_state_bytes
from ..strategy import Strategy
from ..training.state_layout import Leaf, StateLayout
from ..training.step import TrainState
from ..tree import named_leaves, tensor_specs
from .hlo import parse_module
from .liveness import read_liveness


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes on one device.

    Attributes:
        parameters: Parameters as the loss takes them: this device's shards, or copies in a compute dtype.
        optimizer_state: Optimizer state, with its counters, the masters of such copies, and a moving average.
        others: Step number, RNG key, and state of a compression.
        batch: This device's examples.
        padding: What the compiler's layout adds to arguments, such as a TPU's tiles.
        activations: Results of the forward.
        gradients: Results of the backward.
        buckets: Inputs and outputs of collectives, gathered parameters included.
        updates: Results of the optimizer that are not written in place.
    """

    parameters: int = 0
    optimizer_state: int = 0
    others: int = 0
    batch: int = 0
    padding: int = 0
    activations: int = 0
    gradients: int = 0
    buckets: int = 0
    updates: int = 0

    @property
    def state(self) -> int:
        """Bytes that live across steps."""
        return self.parameters + self.optimizer_state + self.others

    @property
    def temporary(self) -> int:
        """Bytes that live within a step."""
        return self.activations + self.gradients + self.buckets + self.updates

    @property
    def total(self) -> int:
        """All bytes."""
        return self.state + self.batch + self.padding + self.temporary


@dataclass(frozen=True)
class StepMemory:
    """A compiled step at three moments.

    Attributes:
        after_init: The state alone.
        before_update: The peak of forward and backward.
        after_step: The peak of the update that follows.
        temporaries: As the compiler laid them out, with fragmentation: slightly more than the peaks need.
    """

    after_init: DeviceBytes
    before_update: DeviceBytes
    after_step: DeviceBytes
    temporaries: int


class Allocated(NamedTuple):
    """What a device's allocator has handed out."""

    in_use_bytes: int
    peak_bytes: int


def held_bytes(layout: StateLayout) -> DeviceBytes:
    """Returns the bytes of parameters and optimizer state on a device.

    The other components are 0.

    Example:
        >>> import jax.numpy as jnp, jaxddp, optax
        >>> trainer = jaxddp.Trainer(lambda params, batch: 0.0, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(4))
        >>> state = trainer.abstract_state({"w": jnp.zeros((2, 5))})
        >>> held_bytes(trainer.layout(state))  # 10 floats in full; 3 of 12 of each moment, and a counter
        DeviceBytes(parameters=40, optimizer_state=28, others=0, ...
    """
    held, copies = {"parameters": 0, "optimizer_state": 0}, named_leaves(layout.copies)
    leaves = {"params": layout.params, "opt_state": layout.opt_state, "copies": layout.copies, "ema": layout.ema}
    for name, leaf in named_leaves(leaves).items():
        held[_component(name, copies)] += leaf.bytes_on_rank
    return DeviceBytes(**held)


def padding_share(layout: StateLayout) -> float:
    """Returns the padding of all sharded leaves as a share of their size; 0 if nothing is sharded.

    Where whole parameters have owners, it is by how much the fullest rank exceeds the average.
    """
    cut = [leaf for leaf in jax.tree.leaves((layout.params, layout.opt_state)) if leaf.cut is not None]
    whole = sum(leaf.dtype.itemsize * _num_elements(leaf) for leaf in cut)
    if layout.leaves is not None:
        owned = jax.tree.leaves(layout.opt_state.owned)
        whole += sum(layout.leaves.state_bytes) - sum(leaf.dtype.itemsize * _num_elements(leaf) for leaf in owned)
    held = sum(leaf.bytes_on_rank * leaf.cut.num_ranks for leaf in cut)
    return held / whole - 1 if whole else 0.0


def state_formula(params: Any, strategy: Strategy, num_ranks: int, per_parameter: PerParameter = FP32) -> StateBytes:
    """Computes by formula what a device holds of the state, and of gradients that outlive their bucket.

    Optimizer scalars such as a step count are not included.

    ``params`` are full arrays or ``jax.ShapeDtypeStruct``, all trainable; the strategy says what is sharded, and how
    (``cut``).

    Raises:
        ValueError: If whole parameters have owners.
    """
    if strategy.shards_leaves:
        raise ValueError(f"strategy (={strategy.name}) must shard elements: held_bytes counts the state of others")
    pieces: list[int] = []
    whole: list[int] = []
    for tensor in tensor_specs(named_leaves(params)).values():
        cut = strategy.cut(tensor, num_ranks) if strategy.shards_optimizer_state else Cut(tensor.shape, num_ranks)
        if cut is None:
            whole.append(tensor.num_elements)
        else:
            pieces += [cut.row_elements] * cut.rows
    stage = strategy.shards_optimizer_state + strategy.shards_gradients + strategy.shards_params
    accumulate: Accumulate = "shards" if strategy.shards_params or strategy.reduces_each_microbatch else "full"
    return exact_state_bytes(pieces, stage, num_ranks, per_parameter, accumulate, whole_elements=whole)


def step_memory(compiled: Any, state: TrainState) -> StepMemory:
    """Reads the memory of a compiled step on each device.

    ``compiled`` is from ``Trainer.compile``, for devices or for a target, and ``state`` what it was compiled for.

    Raises:
        ValueError: If the program takes fewer arguments than the state has leaves.
    """
    stats, liveness = compiled.memory_analysis(), read_liveness(compiled)
    arguments = _arguments(compiled, state, stats.argument_size_in_bytes)
    return StepMemory(
        after_init=replace(arguments, batch=0),
        before_update=replace(arguments, **liveness.peak(0, liveness.backward_end)),
        after_step=replace(arguments, **liveness.peak(liveness.backward_end)),
        temporaries=stats.temp_size_in_bytes,
    )


def allocated_bytes(device: jax.Device) -> Allocated | None:
    """Returns a device's bytes in use and their peak since the process started; None on CPUs, which do not count."""
    stats = device.memory_stats()
    return Allocated(stats["bytes_in_use"], stats["peak_bytes_in_use"]) if stats else None


def _arguments(compiled: Any, state: TrainState, laid_out: int) -> DeviceBytes:
    """Bytes of a program's arguments: the leaves of the state in tree order, then those of the batch."""
    module = parse_module(compiled)
    entry = module.computations[module.entry].values()
    parameters = sorted((int(one.literal), one.num_bytes) for one in entry if one.opcode == "parameter")
    sizes = [num_bytes for _, num_bytes in parameters]
    # JAX drops arguments that are not read: parts of a batch, or an injected hyperparameter that a schedule sets.
    copies = named_leaves(state.copies)
    leaves = [(_component(name, copies), leaf) for name, leaf in named_leaves(state).items()]
    held = {"parameters": 0, "optimizer_state": 0, "others": 0}
    given = list(sizes)
    for name, leaf in leaves:
        full = leaf.size * leaf.dtype.itemsize
        if given and (given[0] == full or (given[0] and full % given[0] == 0)):  # all of it, or a shard
            held[name] += given.pop(0)
        elif name == "optimizer_state" and leaf.ndim == 0:
            held[name] += full
        else:
            raise ValueError(
                f"the program takes {len(sizes)} arguments and the state has {len(leaves)} leaves: it must be a step of"
                " that state"
            )
    return DeviceBytes(**held, batch=sum(given), padding=laid_out - sum(sizes))


def _component(name: str, copies: Collection[str]) -> str:
    """What a leaf of a state counts as, by its name."""
    field, _, leaf = name.partition(".")
    if field == "copies" or (field == "params" and leaf not in copies):
        return "parameters"
    return "optimizer_state" if field in ("params", "opt_state", "ema") else "others"


def _num_elements(leaf: Leaf) -> int:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype).size
