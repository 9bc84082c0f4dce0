"""Evaluation of any number of examples: ranks get equally many rows, of which those that pad do not count.

In a job each process gives rows of its own. With ``n[p]`` rows in the batch of process p, which has ``r[p]`` ranks:

    rows of a rank           R = max over p of ceil(n[p] / r[p]), and at least that of earlier batches
    rank j of process p      its rows j R ... (j + 1) R - 1 as far as there are any, then padding

So all processes run the same program. They exchange ``n[p]`` before each batch; one that has no more gives padding. The
host adds up the sums of the batches in float64, and divides once.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from ..loss import Halves, PerExample, Sum, map_parts
from .validation import check_batch, count_examples, host_arrays, is_global

Watched = Callable[[], AbstractContextManager[Any]]
Run = Callable[[Any, np.ndarray], dict[str, Any]]
"""``(batch, is_real)`` of this process's ranks ``->`` the parts of all ranks, as ``loss.Measure`` gives them."""


def evaluate_batches(run: Run, batches: Any, by_rank: NamedSharding, watched: Watched) -> dict[str, Any]:
    """Evaluates a batch, or an iterable of them; ``watched`` is entered while all processes exchange something."""
    return map_parts(_result, functools.reduce(_add, _parts(run, batches, by_rank, watched)))


def _parts(run: Run, batches: Any, by_rank: NamedSharding, watched: Watched) -> Iterator[dict[str, Any]]:
    """Gives the parts of each batch, on the host."""
    before, num_examples = None, 0
    for batch, is_real, is_real_of_all in _padded(batches, by_rank, watched):
        num_examples += is_real_of_all.sum()
        found = run(batch, is_real), is_real_of_all
        if before is not None:  # read while the devices compute
            yield _on_host(*before)
        before = found
    if before is None or not num_examples:
        raise ValueError("batches hold no examples: there must be at least one")
    yield _on_host(*before)


def _padded(batches: Any, by_rank: NamedSharding, watched: Watched) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Gives batches of this process's ranks until no process has more; which of the rows are real; which of all are."""
    placed: Any = by_rank.devices_indices_map((by_rank.num_devices,))  # of several devices of a rank, the first counts
    process_of = {indices[0].start or 0: device.process_index for device, indices in reversed([*placed.items()])}
    processes = [process_of[start] for start in sorted(process_of)]
    place = np.array([processes[:rank].count(process) for rank, process in enumerate(processes)])
    num_ranks = np.array(list(map(processes.count, processes)))  # of the process of each rank
    num_local = processes.count(jax.process_index())
    most: dict[Any, int] = {}  # rows of a rank, by the shapes of an example
    iterator, end, last = _each(batches), object(), None
    while True:
        batch = host_arrays(next(iterator, end))
        num_rows = -1 if batch is end else _count_local(batch, len(processes), num_local)
        rows = np.full(len(processes), num_rows)
        if len(set(processes)) > 1:
            with watched():
                rows = _of_ranks(num_rows, num_local, by_rank)
        if rows.max() < 0:
            return
        if not most and rows.min() < 0:
            process = processes[rows.argmin()]
            raise ValueError(f"process {process} has no batch: each must have one, which may hold no examples")
        if batch is end:
            batch = jax.tree.map(lambda leaf: np.empty((0, *leaf.shape[1:]), leaf.dtype), last)
        last, rows = batch, rows.clip(0)
        key = tuple((tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in jax.tree.leaves(batch))
        size = most[key] = max(int(np.ceil(rows / num_ranks).max()), most.get(key, 1))
        is_real = np.arange(size) < (rows - place * size)[:, None]
        own = np.arange(size * num_local) < num_rows
        yield jax.tree.map(functools.partial(_pad, num_rows, own.size, by_rank), batch), own, is_real.reshape(-1)


def _each(batches: Any) -> Iterator[Any]:
    """Tells a batch, which is a tree of arrays, from an iterable of batches; a list of trees is one."""
    if isinstance(batches, list):
        is_batch = any(hasattr(one, "shape") for one in batches)
    else:
        is_leaf = jax.tree_util.all_leaves([batches])
        is_batch = not is_leaf or hasattr(batches, "shape") or not isinstance(batches, Iterable)
    return iter([batches] if is_batch else batches)


def _count_local(batch: Any, num_ranks: int, num_local: int) -> int:
    """Counts this process's examples."""
    if any(map(is_global, jax.tree.leaves(batch))):
        check_batch(batch, num_ranks, 1)
        return count_examples(batch) // num_ranks * num_local
    return count_examples(batch)


def _of_ranks(number: int, num_local: int, by_rank: NamedSharding) -> np.ndarray:
    """Gives every process the number of each rank's process."""
    mine = jax.make_array_from_process_local_data(by_rank, np.full(num_local, number, np.int32))
    return np.asarray(multihost_utils.process_allgather(mine, tiled=True))


def _pad(num_rows: int, size: int, by_rank: NamedSharding, leaf: Any) -> Any:
    if num_rows == size:
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_pad(num_rows, size, by_rank, jax.random.key_data(leaf)), impl=leaf.dtype)
    if is_global(leaf):
        shards = {shard.index[0].start: shard.data for shard in jax.device_put(leaf, by_rank).addressable_shards}
        leaf = np.concatenate([shards[start] for start in sorted(shards)])
    padded = np.zeros((size, *leaf.shape[1:]), leaf.dtype)
    padded[: len(leaf)] = leaf
    return padded


def _on_host(parts: dict[str, Any], is_real: np.ndarray) -> dict[str, Any]:
    wide = {"i": np.int64, "u": np.uint64}

    def host(part: Any) -> Any:
        if isinstance(part, PerExample):
            return PerExample([np.asarray(part.values)[is_real]])
        return jax.tree.map(
            lambda sum: np.asarray(sum, np.promote_types(sum.dtype, wide.get(sum.dtype.kind, np.float64))), part
        )

    return map_parts(host, parts)


def _add(total: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    def add(one: Any, other: Any) -> Any:
        if isinstance(one, PerExample):
            return PerExample(one.values + other.values)
        before, now = (jax.tree.leaves(part)[0].shape for part in (one, other))
        if before != now:  # NumPy might broadcast them
            raise ValueError(f"values of examples (={[*now]}) must have one shape, {[*before]} before")
        return jax.tree.map(np.add, one, other)

    if total.keys() != found.keys():
        raise ValueError(f"eval_fn must return the same names for every batch: {[*found]}, and {[*total]} before")
    return map_parts(add, total, found)


def _result(part: Any) -> Any:
    if isinstance(part, PerExample):
        return np.concatenate(part.values)
    total = part[0]
    total = (total.high << 16) + total.low if isinstance(total, Halves) else total
    return total[()] if isinstance(part, Sum) else total / (part.weight or 1)
