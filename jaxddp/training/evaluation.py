"""Evaluation of any number of examples: ranks get equally many rows, of which those that pad do not count.

The host adds up the sums of the batches in float64, and divides once. In a job each process gives rows of its own. With
``n[p]`` rows in the batch of process p, which has ``r[p]`` ranks:

    rows of a rank           R = max over p of ceil(n[p] / r[p]), and at least that of earlier batches
    rank j of process p      its rows j R ... (j + 1) R - 1 as far as there are any, then padding
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from ..loss import PerExample, Sum, map_parts
from .validation import count_examples, host_arrays, is_global

Watched = Callable[[], AbstractContextManager[Any]]  # entered while all processes exchange something


def evaluate_batches(run: Callable[..., Any], batches: Any, by_rank: NamedSharding, watched: Watched) -> dict[str, Any]:
    """Evaluates batches by ``run``: ``(batch, is_real)`` of this process's ranks to parts and ``is_real`` of all."""
    found: list[Any] = []
    running: list[Any] = []  # the last batch
    for inputs in _padded(batches, by_rank, watched):
        before, running = running, [run(inputs)]
        found += jax.device_get(before)  # read while the devices compute
    found += jax.device_get(running)
    masks = [is_real for _, is_real in found]
    if not any(is_real.any() for is_real in masks):
        raise ValueError("batches hold no examples: there must be at least one")

    def result(*parts: Any) -> Any:  # one of each batch
        if isinstance(parts[0], PerExample):
            return np.concatenate([part.values[is_real] for part, is_real in zip(parts, masks, strict=True)])
        part = jax.tree.map(_sum, *parts)
        return part.values if isinstance(part, Sum) else part.total / (part.weight or 1)

    return map_parts(result, *[parts for parts, _ in found])


def _sum(*totals: np.ndarray) -> Any:
    wide = {"i": np.int64, "u": np.uint64, "c": np.complex128}
    return np.sum(totals, axis=0, dtype=wide.get(totals[0].dtype.kind, np.float64))


def _padded(batches: Any, by_rank: NamedSharding, watched: Watched) -> Iterator[tuple[Any, np.ndarray]]:
    """Gives batches of this process's ranks until no process has more, and which of their rows are real."""
    placed: Any = by_rank.addressable_devices_indices_map((by_rank.num_devices,))
    num_local = len({indices[0].start for indices in placed.values()})  # a rank may have several devices
    is_job = not by_rank.is_fully_addressable
    most: dict[Any, int] = {}  # rows of a rank, by the shapes of an example
    iterator, end, last = _each(batches), object(), None
    while True:
        batch = next(iterator, end)
        if batch is not end:
            batch = jax.tree.map(lambda leaf: _local_rows(leaf, by_rank) if is_global(leaf) else leaf, batch)
            batch = host_arrays(batch)
        num_rows = -1 if batch is end else count_examples(batch)
        rows = np.array([-1 if batch is end else -(-num_rows // num_local)])
        if is_job:
            mine = jax.make_array_from_process_local_data(by_rank, np.repeat(rows.astype(np.int32), num_local))
            with watched():
                rows = np.asarray(multihost_utils.process_allgather(mine, tiled=True))
        if rows.max() < 0:
            return
        if not most and rows.min() < 0:
            raise ValueError("each process must have a batch, which may hold no examples: one has none")
        if batch is end:
            batch = jax.tree.map(lambda leaf: np.empty((0, *leaf.shape[1:]), leaf.dtype), last)
        last = batch
        key = tuple((tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in jax.tree.leaves(batch))
        most[key] = max(int(rows.max()), most.get(key, 1))
        is_real = np.arange(most[key] * num_local) < num_rows
        yield jax.tree.map(functools.partial(_pad, is_real.size), batch), is_real


def _each(batches: Any) -> Iterator[Any]:
    """Tells a batch, which is a tree of arrays, from an iterable of batches; a list of trees is one."""
    if isinstance(batches, list):
        is_batch = any(hasattr(one, "shape") for one in batches)
    else:
        is_batch = hasattr(batches, "shape") or not jax.tree_util.all_leaves([batches])
    return iter([batches] if is_batch else batches)


def _local_rows(leaf: jax.Array, by_rank: NamedSharding) -> np.ndarray:
    """Gives this process's rows of an array over several processes."""
    shards = {shard.index[0].start: shard.data for shard in jax.device_put(leaf, by_rank).addressable_shards}
    return np.concatenate([shards[start] for start in sorted(shards)])


def _pad(size: int, leaf: Any) -> Any:
    return leaf if len(leaf) == size else np.pad(leaf, [(0, size - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)])
