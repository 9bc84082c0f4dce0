"""What each device holds of a training state and of a compiled step, by component: read, and by formula.

    after init         parameters, optimizer state, and the numbers beside them: what lives across steps
    before the update  these, the batch, and the most that is alive at a time until the backward ends
    after the step     these, the batch, and the most that is alive at a time from there on

Three sources tell of it. The **layout** of a state says what every leaf takes on a device, and its **formula**
(``cost/memory.py``) must give the same to the byte. The **compiled step** takes the state as arguments, of which the
compiler says the bytes: they must be the same again. What it holds beside them follows from its schedule
(``liveness.py``). The **allocator** of a device says what is in use, whatever it is for.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from ..communication.sharding import Cut
from ..planning.cost.memory import FP32, PerParameter, StateBytes, activation_bytes, exact_state_bytes
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
        parameters: Of the model, or of this device's shards of them.
        optimizer_state: Of the optimizer, its counts included.
        others: The step's number, the key, and what a compression remembers.
        batch: This device's examples.
        padding: What the compiler's layout adds to arguments, such as a TPU's tiles.
        activations: Results of the forward.
        gradients: Results of the backward.
        buckets: What collectives send and receive, gathered parameters included.
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
        """What lives across steps."""
        return self.parameters + self.optimizer_state + self.others

    @property
    def temporary(self) -> int:
        """What comes and goes within a step."""
        return self.activations + self.gradients + self.buckets + self.updates

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.batch + self.padding + self.temporary


@dataclass(frozen=True)
class StepMemory:
    """A compiled step at three moments.

    Attributes:
        after_init: The state alone.
        before_update: At the peak of the forward and backward.
        after_step: At the peak of what follows, as the update is made; then the state alone is left.
        temporaries: As the compiler laid them out, with the gaps between them: what the peaks need, and little more.
    """

    after_init: DeviceBytes
    before_update: DeviceBytes
    after_step: DeviceBytes
    temporaries: int


class Allocated(NamedTuple):
    """What a device's allocator has given out."""

    in_use_bytes: int
    peak_bytes: int


def held_bytes(layout: StateLayout) -> DeviceBytes:
    """Gives what a device has of the parameters and the optimizer's state.

    Args:
        layout: Of the state, as ``Trainer.layout`` gives it.

    Returns:
        Both; the other components are 0.

    Example:
        >>> import jax.numpy as jnp, jaxddp, optax
        >>> trainer = jaxddp.Trainer(None, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(4))
        >>> state = trainer.abstract_state({"w": jnp.zeros((2, 5))})
        >>> held_bytes(trainer.layout(state))  # 10 floats whole; of each moment 3 of 12, and a count
        DeviceBytes(parameters=40, optimizer_state=28, others=0, ...
    """
    params, opt_state = (
        sum(leaf.bytes_on_rank for leaf in jax.tree.leaves(tree)) for tree in (layout.params, layout.opt_state)
    )
    return DeviceBytes(params, opt_state)


def padding_share(layout: StateLayout) -> float:
    """Gives how much more shards take than 1/N of what they are cut from, over all that is cut; 0 if nothing is."""
    cut = [leaf for leaf in jax.tree.leaves((layout.params, layout.opt_state)) if leaf.cut is not None]
    whole = sum(leaf.dtype.itemsize * _num_elements(leaf) for leaf in cut)
    held = sum(leaf.bytes_on_rank * leaf.cut.num_ranks for leaf in cut)
    return held / whole - 1 if whole else 0.0


def state_formula(params: Any, strategy: Strategy, num_ranks: int, per_parameter: PerParameter = FP32) -> StateBytes:
    """Gives by formula what a device holds of the state, and of gradients that outlive their bucket.

    Scalars that an optimizer keeps, such as a count of steps, are not in it.

    Args:
        params: The model: a tree of whole arrays or ``jax.ShapeDtypeStruct``, all trained.
        strategy: What it shards, and how (``cut``).
        num_ranks: N.
        per_parameter: Bytes of each parameter, its gradient and the optimizer's state of it.

    Returns:
        Parameters, gradients, optimizer state.
    """
    pieces: list[int] = []
    whole: list[int] = []
    for tensor in tensor_specs(named_leaves(params)).values():
        cut = strategy.cut(tensor, num_ranks) if strategy.shards_optimizer_state else Cut(tensor.shape, num_ranks)
        if cut is None:
            whole.append(tensor.num_elements)
        else:
            pieces += [cut.row_elements] * cut.rows
    shards = (strategy.shards_params, strategy.reduces_each_microbatch, strategy.shards_optimizer_state, True)
    stage = 3 - shards.index(True)
    return exact_state_bytes(pieces, stage, num_ranks, per_parameter, whole_elements=whole)


def layer_growth_bytes(
    tokens: int, kept_per_token: int, leaf_elements: Sequence[int], num_ranks: int, element_bytes: int = 4
) -> int:
    """Gives what one more layer adds to the temporaries of ``zero3``, if each is a unit (``jaxddp.layer``).

    What outlives a unit is what its backward needs, its inputs and the results of its matrix products, and then the
    shards of its gradients. Its whole parameters and their whole gradients do not: they would add 2 Psi.

        tokens x kept elements + sum over leaves of ceil(n / N)

    Args:
        tokens: That a rank works on at once.
        kept_per_token: Elements of a token that are kept.
        leaf_elements: Elements of each parameter of the layer.
        num_ranks: N.
        element_bytes: Of an element.

    Returns:
        Bytes.

    Example:
        >>> layer_growth_bytes(512, 512 + 2048, [512 * 2048, 2048 * 512], 8) / 2**20
        6.0
    """
    gradients = exact_state_bytes(leaf_elements, 3, num_ranks, PerParameter(0, element_bytes, 0)).gradients
    return int(activation_bytes(tokens, kept_per_token, element_bytes=element_bytes)) + gradients


def step_memory(compiled: Any, state: TrainState) -> StepMemory:
    """Reads what a compiled step holds.

    Args:
        compiled: What ``Trainer.compile`` gives, for devices or for a target.
        state: That it was compiled for: of arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        Its memory on each device.

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
    """Asks a device's allocator what is in use, and what was at most since the process began.

    Args:
        device: Of this process.

    Returns:
        Both; None where the allocator does not count, as on CPUs.
    """
    stats = device.memory_stats()
    return Allocated(stats["bytes_in_use"], stats["peak_bytes_in_use"]) if stats else None


def _arguments(compiled: Any, state: TrainState, laid_out: int) -> DeviceBytes:
    """Bytes of a program's arguments: first the leaves of the state, in the order of the tree, then the batch's."""
    module = parse_module(compiled)
    entry = module.computations[module.entry].values()
    parameters = sorted((int(one.literal), one.num_bytes) for one in entry if one.opcode == "parameter")
    sizes = [num_bytes for _, num_bytes in parameters]
    # A step returns all of its state, so JAX drops none of it, as it drops what of a batch is not used.
    counts = {name: len(jax.tree.leaves(tree)) for name, tree in state._asdict().items()}
    if sum(counts.values()) > len(sizes):
        raise ValueError(
            f"the program takes {len(sizes)} arguments and the state has {sum(counts.values())} leaves: it must be a "
            "step of that state"
        )
    rest = iter(sizes)
    held = {name: sum(next(rest) for _ in range(count)) for name, count in counts.items()}
    params, opt_state = held.pop("params"), held.pop("opt_state")
    return DeviceBytes(params, opt_state, sum(held.values()), batch=sum(rest), padding=laid_out - sum(sizes))


def _num_elements(leaf: Leaf) -> int:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype).size
