"""A training state on the host, as checkpoints hold it: every leaf in full, however the ranks hold it.

Keys are there as their words, unsigned integers ``[shape, words]``. Of parameters in a compute dtype, the masters are
on the host, in their place: restoring casts them again.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ..layout import Leaf, whole
from ..strategy import Masters
from ..training.placement import PIECE_BYTES, place
from ..training.step import TrainState
from ..training.train import Trainer
from ..training.validation import check_state
from ..tree import is_key, like, named_leaves


def places_of(trainer: Trainer, state: TrainState) -> TrainState:
    """Describes each leaf of a state on the host, and how it is sharded over the ranks."""
    layout = trainer.layout(state)
    opt_state = _inner(layout.opt_state) if layout.owners is None else whole(layout.owners.slots)
    step, key, model_state = whole((state.step, state.key, state.model_state))
    return TrainState(step, trainer.masters(state)[1], opt_state, key, model_state)


def to_host(trainer: Trainer, state: TrainState) -> Iterator[tuple[str, np.ndarray]]:
    """Copies a state to every host, and yields name and full array leaf by leaf; they share no memory."""
    places = named_leaves(places_of(trainer, state))
    opt_state = _inner(state.opt_state)
    if (owners := trainer.layout(state).owners) is not None:
        opt_state = owners.on_host(opt_state, partial(_rows, owners.num_ranks))
    for name, leaf in named_leaves(state._replace(params=trainer.masters(state)[0], opt_state=opt_state)).items():
        yield name, _to_host(leaf, places[name])


def host_params(trainer: Trainer, state: TrainState) -> Any:
    """Copies the full parameters to the host leaf by leaf, as NumPy arrays in the tree that ``init`` was given."""
    check_state(state)
    return jax.tree.map(_to_host, *trainer.masters(state))


def to_ranks(trainer: Trainer, state: TrainState, arrays: Mapping[str, np.ndarray]) -> TrainState:
    """Inverts ``to_host``, for any trainer and a state of its ``abstract_state``, with dtypes no narrower."""
    layout, places, owned = trainer.layout(state), places_of(trainer, state), set()
    if (owners := layout.owners) is not None:
        names = named_leaves({"opt_state": owners.slots})
        owned = {name for name, param in zip(names, owners.param_of.values(), strict=True) if param is not None}
    placed = {
        name: arrays[name] if name in owned else place(arrays[name], where, trainer.mesh, trainer.ranks.axis)
        for name, where in named_leaves(places).items()
    }
    new: TrainState = like(places, placed)
    if owners is not None:
        opt_state = owners.from_host(new.opt_state)
        buffers = place(opt_state.owned, _inner(layout.opt_state).owned, trainer.mesh, trainer.ranks.axis)
        new = new._replace(opt_state=opt_state._replace(owned=buffers))
    if not isinstance(layout.opt_state, Masters):
        return new
    return trainer.with_masters(new._replace(opt_state=Masters((), new.opt_state), params=state.params), new.params)


def is_finite(name: str, array: np.ndarray) -> bool:
    """Whether it may be saved. A mask holds infinities, and so may an optimizer's scalar, as the best loss."""
    if not jnp.issubdtype(array.dtype, jnp.floating) or (array.ndim == 0 and not name.startswith("params")):
        return True
    return not bool((np.isnan(array) if name.startswith("model_state") else ~np.isfinite(array)).any())


def _inner(opt_state: Any) -> Any:
    return opt_state.inner if isinstance(opt_state, Masters) else opt_state


def _to_host(leaf: Any, where: Leaf) -> np.ndarray:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not (isinstance(leaf, np.ndarray) or leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    held: Any = np.asarray(leaf)
    # A copy: on CPUs NumPy shares JAX's memory, which the next step reuses.
    return np.array(where.from_global(held), order="C")


def _rows(num_ranks: int, buffer: jax.Array) -> np.ndarray:
    """Copies a buffer of owned state to the host; between processes in pieces, which fit every device."""
    if buffer.is_fully_addressable:
        return np.asarray(buffer)
    width = buffer.size // num_ranks
    piece = min(width, max(1, PIECE_BYTES // (num_ranks * buffer.dtype.itemsize)))
    rows = np.empty((num_ranks, width), buffer.dtype)
    for start in range(0, width, piece):
        first = min(start, width - piece)
        columns = jax.lax.dynamic_slice_in_dim(buffer.reshape(num_ranks, width), first, piece, 1)
        rows[:, first : first + piece] = multihost_utils.process_allgather(columns, tiled=True)
    return rows
