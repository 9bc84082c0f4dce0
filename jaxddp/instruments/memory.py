"""Memory of each device by component: of a training state, by its layout, and of a compiled step that takes it."""

from typing import Any, NamedTuple

import jax

from ..strategy import Layout
from ..training.step import TrainState
from ..tree import named_leaves
from .hlo import parse_module


class DeviceBytes(NamedTuple):
    """Bytes on one device."""

    parameters: int = 0  # parameters as the loss takes them: this device's shards, or copies in a compute dtype
    optimizer_state: int = 0  # optimizer state, with its counters, the masters of such copies, and a moving average
    others: int = 0  # step number, RNG key, and model state
    batch: int = 0  # this device's examples
    padding: int = 0  # what the compiler's layout adds to arguments, such as a TPU's tiles
    temporaries: int = 0  # what lives within a step, as the compiler laid it out


def held_bytes(layout: Layout) -> DeviceBytes:
    """Returns the bytes of parameters and optimizer state on a device; the other components are 0."""
    trees = layout.params, layout.opt_state
    return DeviceBytes(*(sum(leaf.bytes_on_rank for leaf in jax.tree.leaves(tree)) for tree in trees))


def step_memory(compiled: Any, state: TrainState) -> DeviceBytes:
    """Reads the memory of a step on each device from ``Trainer.compile``; a ValueError if it is of another state."""
    entry, stats = parse_module(compiled.as_text()).entry.values(), compiled.memory_analysis()
    parameters = sorted((int(one.literal), one.num_bytes) for one in entry if one.opcode == "parameter")
    given = [num_bytes for _, num_bytes in parameters]
    padding = stats.argument_size_in_bytes - sum(given)
    leaves = named_leaves(state)
    held = {"parameters": 0, "optimizer_state": 0, "others": 0}
    # Arguments are the leaves of the state in tree order, then those of the batch. JAX drops those that are not read:
    # parts of a batch, or an injected hyperparameter that a schedule sets.
    for name, leaf in leaves.items():
        component = {"params": "parameters", "opt_state": "optimizer_state"}.get(name.partition(".")[0], "others")
        full = leaf.size * leaf.dtype.itemsize
        if given and (given[0] == full or (given[0] and full and full % given[0] == 0)):  # all of it, or a shard
            held[component] += given.pop(0)
        elif full == 0 or (component == "optimizer_state" and leaf.ndim == 0):
            held[component] += full
        else:
            raise ValueError(
                f"the program takes {len(parameters)} arguments and the state has {len(leaves)} leaves: it must be a"
                " step of that state"
            )
    return DeviceBytes(**held, batch=sum(given), padding=padding, temporaries=stats.temp_size_in_bytes)
