"""Saves training states, and restores them on any number of ranks and under any strategy.

A checkpoint does not depend on the ranks: it holds every leaf in full, in its own shape, without padding, under its
name in the state, such as ``params.head.kernel`` or ``opt_state.0.mu.head.kernel``. Restoring shards it again.
``DIR/120/state/`` holds the arrays by name in Orbax's format, without empty ones; ``about.json`` (``folder.py``)
describes each leaf by its shape and dtype. Nothing is pickled.

A save copies the state to the host, leaf by leaf, and returns. A thread of process 0 writes it; the others hear through
the store of ``jax.distributed`` what became of it.

A checkpoint fits if its parameters and optimizer state have the expected names and shapes, and dtypes that lose
nothing: bfloat16 may be restored as float32, as under a strategy with wide masters, but not the other way round.

Assumptions: the host has memory for the state. With several processes, each leaf in turn is gathered on every device
while it is copied to the host; with one process no device holds more than its shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax._src import distributed  # the store has no public name

from ..arguments import check_flag, check_function, check_kind
from ..processes.stderr import print_line
from ..training.train import Trainer, TrainState
from ..training.validation import check_state
from ..tree import named_leaves
from .folder import CheckpointFolder, as_json, described, error_of, refuse_nonfinite
from .host_state import is_key, places_of, to_host, to_ranks, without_owned

_ANSWER_S = 1200  # for process 0 to begin or finish a save
_OWNERS = {"params": "model", "opt_state": "optimizer", "model_state": "model"}
Row = Mapping[str, Any]
"""``shape, dtype`` of one leaf, and ``impl`` of an RNG key."""

_unfinished: set[Checkpoints] = set()  # those that may still be writing
_numbers = itertools.count()  # of what processes tell each other: the same in all


class Checkpoints(CheckpointFolder):
    """The checkpoints in one folder; a context manager that finishes the last write at its end.

    Without ``with`` or ``close`` the end of the interpreter finishes it. All processes of a job call ``reserve``,
    ``latest_step``, ``save``, ``restore``, ``restore_params``, ``wait`` and ``close``.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, jaxddp
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> params = {"w": jnp.zeros((3, 1))}
        >>> batch = {"x": jnp.ones((12, 3)), "y": jnp.ones((12, 1))}
        >>> on_4 = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(4))
        >>> on_3 = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.bucketed(), jaxddp.data_mesh(3))
        >>> with tempfile.TemporaryDirectory() as folder, jaxddp.Checkpoints(folder) as checkpoints:
        ...     state, _ = on_4.step(on_4.init(params), batch)
        ...     checkpoints.save(on_4, state, data_position=12)
        ...     state, data_position = checkpoints.restore(on_3, params)
        >>> int(state.step), data_position
        (1, 12)
    """

    package = "jaxddp"
    before = "[0-9]*/about/metadata"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Opens a folder, and creates it if needed.

        Args:
            directory: The folder; on a shared file system if several processes train together. What else it holds is
                left alone.
            keep: Checkpoints to keep; older ones are removed once a newer one is complete.
            warn: Gets a line about each damaged checkpoint for which an older one is taken.

        Raises:
            ValueError: If ``keep`` is not positive, or the folder is a file or "".
            OSError: If it cannot be created.
        """
        check_function("warn", warn, "a function of a line")
        super().__init__(directory, keep, warn)
        self._error: Callable[[], BaseException | None] | None = None  # of the last save; waits until it is written

    def save(self, trainer: Trainer, state: TrainState, *, data_position: Any = None, set_aside: bool = False) -> None:
        """Saves a state under its step: returns once it is copied, and writes in the background.

        Waits for an earlier save that is still being written.

        Args:
            trainer: The state's trainer.
            state: May be donated to the next step as soon as this returns.
            data_position: Where to continue in the data, as a JSON value.
            set_aside: Saves it as ``STEP.nonfinite``, which is not restored before it is renamed. The last one is kept.

        Raises:
            ValueError: If the state was donated, another job saves into the folder, it has a checkpoint of this or a
                later step or something else of that name, or the position is not JSON.
            FloatingPointError: If parameters, or arrays of the optimizer state, hold NaN or infinity.
            OSError: If the folder cannot be written, or the earlier save failed.
        """
        check_kind("trainer", trainer, Trainer, "a jaxddp.Trainer")
        check_flag(set_aside=set_aside)
        check_state(state)
        data_position = as_json(data_position)
        step = int(state.step)
        self.wait()
        self._on_first(lambda: self._begin(step, set_aside))
        arrays, nonfinite = {}, []
        for name, array in to_host(trainer, state):
            if not _is_finite(name, array):
                nonfinite.append(name)
            if jax.process_index() == 0 and array.size:  # the others help to gather
                arrays[name] = array
        refuse_nonfinite(step, nonfinite)
        leaves, places = named_leaves(without_owned(trainer, state)), named_leaves(places_of(trainer, state))
        about = {
            "step": step,
            "strategy": trainer.strategy.name,
            "num_ranks": trainer.num_ranks,
            "data_position": data_position,
            "leaves": {name: _row(leaves.get(name, place), place) for name, place in places.items()},
        }
        key = f"jaxddp/checkpoint/{next(_numbers)}/written"
        if jax.process_index():
            self._error = lambda: _answer(key)
            return

        def write() -> None:
            error: Exception | None = OSError(f"{self._name(step)} was not saved")
            try:
                self._write(about, set_aside, lambda folder: _save(arrays, folder / "state"))
                error = None
            except Exception as found:
                error = found
                raise
            finally:
                if jax.process_count() > 1:
                    _store().key_value_set(key, json.dumps(error and described(error)))

        _unfinished.add(self)
        thread = ThreadPoolExecutor(max_workers=1)
        written: Future[None] = thread.submit(write)  # which raises no Ctrl-C: that is the main thread's
        thread.shutdown(wait=False)
        self._error = written.exception

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            OSError: If a save failed.
        """
        if self._error is None:
            return
        error = self._error()
        self._error = None
        _unfinished.discard(self)
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits, and lets other jobs save into the folder.

        Raises:
            OSError: If a save failed.
        """
        try:
            self.wait()
        finally:
            super().close()

    def restore(
        self, trainer: Trainer, params: Any, *, model_state: Any = None, step: int | None = None
    ) -> tuple[TrainState, Any]:
        """Restores a state for a trainer's ranks and strategy.

        Args:
            trainer: May have other ranks and another strategy than the trainer that saved.
            params: The model's parameters, for their names, shapes and dtypes: arrays or ``jax.ShapeDtypeStruct``.
                Dtypes may be wider than those saved, never narrower.
            model_state: The same of the model state, with ``has_state``.
            step: Of the checkpoint; the newest that is not damaged for process 0 if None.

        Returns:
            The state, and the data position saved with it.

        Raises:
            ValueError: If there is no such checkpoint; if it is of another model or optimizer, of wider dtypes,
                damaged, or written by another version; or if a process cannot read what process 0 reads. Checkpoints
                are never changed.
            OSError: If it cannot be read.
        """
        check_kind("trainer", trainer, Trainer, "a jaxddp.Trainer")
        self.wait()
        about = self._agree(step)
        name, saved = self._name(about["step"]), about["leaves"]
        _check_shapes(name, "params", saved, params)  # first, so that the trainer never sees another model
        state = trainer.abstract_state(params, model_state)
        places = places_of(trainer, state)
        _check_shapes(name, "opt_state", saved, places.opt_state)
        if jax.tree.leaves(places.model_state):  # one that is not asked for stays in the checkpoint
            _check_shapes(name, "model_state", saved, places.model_state)
        _check_dtypes(name, saved, named_leaves(places))
        impls = {name: row["impl"] for name, row in saved.items() if "impl" in row}
        arrays = self._on_each(lambda: self._read(about["step"], saved))
        return to_ranks(trainer, state, arrays, impls), about["data_position"]

    def restore_params(self, params: Any, *, model_state: Any = None, step: int | None = None) -> Any:
        """Restores parameters alone, for another optimizer, a model with other parts, or to evaluate.

        Args:
            params: Parameters, for their names, shapes and dtypes: arrays or ``jax.ShapeDtypeStruct``. What else the
                checkpoint has is left there. Dtypes may be wider than those saved, never narrower.
            model_state: The model's state, which is restored too.
            step: Of the checkpoint; the newest that is not damaged for process 0 if None.

        Returns:
            A tree like ``params`` of NumPy arrays, and JAX's PRNG keys, for ``Trainer.init``; with a ``model_state``
            that tree and one like it.

        Raises:
            ValueError: If a leaf is missing in the checkpoint, has another shape or a wider dtype there, or as
                ``restore``.
            OSError: If it cannot be read.
        """
        self.wait()
        about = self._agree(step)
        found = self._restore_tree(about, "params", params)
        return found if model_state is None else (found, self._restore_tree(about, "model_state", model_state))

    def _restore_tree(self, about: dict[str, Any], owner: str, tree: Any) -> Any:
        leaves = named_leaves({owner: tree})
        saved = {name: row for name, row in about["leaves"].items() if name in leaves}
        _check_shapes(self._name(about["step"]), owner, saved, tree)
        _check_dtypes(self._name(about["step"]), saved, leaves)
        arrays = self._on_each(lambda: self._read(about["step"], saved))
        restored = [
            jax.random.wrap_key_data(jnp.asarray(arrays[name]), impl=saved[name]["impl"])
            if is_key(leaf)
            else arrays[name].astype(leaf.dtype)
            for name, leaf in leaves.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), restored)

    def _read(self, step: int, rows: Mapping[str, Row]) -> dict[str, np.ndarray]:
        """Reads arrays of a sound checkpoint."""
        arrays = {name: np.zeros(row["shape"], row["dtype"]) for name, row in rows.items() if 0 in row["shape"]}
        stored = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in rows if name not in arrays}
        if not stored:  # Orbax wants one
            return arrays
        args = ocp.args.PyTreeRestore(item=dict.fromkeys(stored, 0), restore_args=stored, partial_restore=True)
        with _orbax() as orbax:
            return arrays | orbax.restore(self._path(step) / "state", args=args)

    @property
    def _place(self) -> tuple[int, int]:
        return jax.process_index(), jax.process_count()

    def _exchange(self, text: str) -> list[str]:
        key = f"jaxddp/checkpoint/{next(_numbers)}"
        _store().key_value_set(f"{key}/{jax.process_index()}", text)
        return [
            _store().blocking_key_value_get(f"{key}/{process}", 1000 * _ANSWER_S)
            for process in range(jax.process_count())
        ]


class _HostArrays(ocp.type_handlers.NumpyHandler):
    """Writes arrays without another copy; when one write fails, the others end before their event loop does."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def _background_serialize(self, *args: Any) -> None:
        try:
            await super()._background_serialize(*args)
        finally:  # else they would print tracebacks
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def _orbax() -> Any:
    """Orbax in this process alone: its processes would wait for each other, 20 minutes for one that failed."""
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"jaxddp-{index}"
    )
    # Only NumPy arrays are written, but Orbax warns about a registry without JAX's.
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _HostArrays()), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=alone)
    checkpointer = ocp.Checkpointer(handler, multiprocessing_options=alone)
    try:
        yield checkpointer
    finally:
        checkpointer.close()


def _save(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    with _orbax() as orbax:
        orbax.save(path, args=ocp.args.PyTreeSave(dict(arrays)))


def _answer(key: str) -> Exception | None:
    """What process 0 raised while it wrote."""
    answer = json.loads(_store().blocking_key_value_get(key, 1000 * _ANSWER_S))
    return None if answer is None else error_of(*answer)


def _store() -> Any:
    return distributed.global_state.client


def _is_finite(name: str, array: np.ndarray) -> bool:
    """Whether a leaf has no NaN or infinity; scalars of an optimizer may, such as the best loss so far."""
    is_checked = array.ndim > 0 or name.startswith("params")
    return not is_checked or not jnp.issubdtype(array.dtype, jnp.floating) or bool(np.isfinite(array).all())


def _row(leaf: Any, place: Any) -> Row:
    """Describes a saved leaf: ``leaf`` over the ranks, if it is one there, ``place`` on the host."""
    row = {"shape": list(place.shape), "dtype": str(place.dtype)}
    return row | {"impl": str(jax.random.key_impl(leaf))} if is_key(leaf) else row


def _check_shapes(checkpoint: str, owner: str, saved: Mapping[str, Row], wanted: Any) -> None:
    """Raises ValueError, naming the first difference, if leaves have other names or shapes."""
    theirs = {
        name: (row["dtype"], tuple(row["shape"])) for name, row in saved.items() if name.partition(".")[0] == owner
    }
    ours = {
        name: (getattr(leaf, "dtype", type(leaf).__name__), np.shape(leaf))
        for name, leaf in named_leaves({owner: wanted}).items()
    }
    for name in ours | theirs:
        if name in ours and name in theirs and ours[name][1] == theirs[name][1]:
            continue
        there, here = (" ".join(map(str, found[name])) if name in found else "missing" for found in (theirs, ours))
        raise ValueError(f"{checkpoint} is of another {_OWNERS[owner]}: {name} is {there} there and {here} here")


def _check_dtypes(checkpoint: str, saved: Mapping[str, Row], wanted: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the first leaf, if a dtype is narrower than the saved one."""
    for name, row in saved.items():
        if name.partition(".")[0] in _OWNERS and name in wanted and not _holds(wanted[name], row):
            raise ValueError(
                f"{checkpoint} has {name} in {row['dtype']}, of which {wanted[name].dtype} here would lose bits: "
                f"restore in {row['dtype']}"
            )


def _holds(leaf: Any, row: Row) -> bool:
    """Whether the dtype of a leaf represents every number of a saved dtype."""
    if str(leaf.dtype) == row["dtype"]:
        return True
    if is_key(leaf) or "impl" in row:
        return False
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (leaf.dtype, row["dtype"])):
        return False
    ours, theirs = jnp.finfo(leaf.dtype), jnp.finfo(row["dtype"])
    return ours.nmant >= theirs.nmant and ours.maxexp >= theirs.maxexp and ours.minexp <= theirs.minexp


def _finish_all() -> None:
    for one in list(_unfinished):
        try:
            one.wait()
        except Exception as error:  # the interpreter is ending: nobody could catch it, and other folders must finish
            print_line(str(error))


# Before concurrent.futures refuses new work, without which no write ends: atexit would be too late.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
