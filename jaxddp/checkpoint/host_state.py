"""A training state on the host, as checkpoints hold it: every leaf in full, however the ranks hold it.

Keys are there as their words, unsigned integers ``[shape, words]``. Of parameters in a compute dtype, the masters are
on the host, in their place: restoring casts them again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..layout import Leaf, whole
from ..strategy import Masters
from ..training.placement import place
from ..training.step import TrainState
from ..training.train import Trainer
from ..training.validation import check_state
from ..tree import is_floating, is_key, like, named_leaves


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
    """Inverts ``to_host``, for any trainer and a state of its ``abstract_state``; wider moments stay wider."""
    layout, places = trainer.layout(state), places_of(trainer, state)
    given: TrainState = like(places, dict(arrays))
    if layout.owners is not None:
        given = given._replace(opt_state=layout.owners.from_host(given.opt_state))
    opt_places = jax.tree.map(_as_saved, _inner(layout.opt_state), given.opt_state)
    new = place(given, places._replace(opt_state=opt_places), trainer.mesh, trainer.ranks.axis)
    if not isinstance(layout.opt_state, Masters):
        return new
    return trainer.with_masters(new._replace(opt_state=Masters((), new.opt_state), params=state.params), new.params)


def _inner(opt_state: Any) -> Any:
    return opt_state.inner if isinstance(opt_state, Masters) else opt_state


def _as_saved(leaf: Leaf, array: np.ndarray) -> Leaf:
    is_wider = not is_key(leaf) and is_floating(array.dtype) and not np.can_cast(array.dtype, leaf.dtype)
    return replace(leaf, dtype=array.dtype) if is_wider else leaf


def _to_host(leaf: Any, where: Leaf) -> np.ndarray:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not (isinstance(leaf, np.ndarray) or leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    held: Any = np.asarray(leaf)
    # A copy: on CPUs NumPy shares JAX's memory, which the next step reuses.
    return np.array(where.from_global(held), order="C")


def _rows(num_ranks: int, buffer: jax.Array) -> np.ndarray:
    """Copies a buffer of owned state to the host; between processes rank by rank, which fits every device."""
    if buffer.is_fully_addressable:
        return np.asarray(buffer)
    rows = buffer.reshape(num_ranks, -1)
    return np.stack([multihost_utils.process_allgather(rows[rank], tiled=True) for rank in range(num_ranks)])
