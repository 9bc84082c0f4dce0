"""Saves training states, and restores them on any number of ranks and under any strategy.

A checkpoint does not depend on the ranks: it holds every leaf in full, in its own shape, without padding, under its
name in the state, such as ``params.head.kernel`` or ``opt_state.0.mu.head.kernel``. Restoring shards it again.

    =================  =====================================================================================
    in DIR/120         holds
    =================  =====================================================================================
    ``state/``         the arrays of the state of step 120, by name, in Orbax's format; empty arrays are
                       left out
    ``about/metadata`` JSON: format, step, strategy, number of ranks, time, position in the data, and for each leaf
                       its shape, dtype and checksum
    =================  =====================================================================================

A save copies the state to the host, leaf by leaf, and returns. A thread writes it with Orbax, which renames the folder
when it is complete, so a checkpoint is never partial; older ones are removed afterwards, if their ``about`` is of this
program. With several processes, process 0 writes, tells the others through the store of ``jax.distributed`` what became
of it, and all read. While it writes, or from ``reserve`` on, it locks ``DIR/.writer``, so that no other job does.
Nothing is pickled.

A checkpoint fits if its parameters and optimizer state have the expected names and shapes, and dtypes that lose
nothing: bfloat16 may be restored as float32, as under a strategy with wide masters, but not the other way round.

Assumptions: the host has memory for the state. With several processes, each leaf in turn is gathered on every device
while it is copied to the host; with one process no device holds more than its shards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import json
import os
import re
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax._src import distributed  # the store has no public name

from ..arguments import check_flag, check_function, check_kind
from ..layout import Leaf
from ..processes.stderr import print_line
from ..training.train import Trainer, TrainState
from ..training.validation import check_alive, check_state
from ..tree import named_leaves
from .folder import CheckpointFolder, refuse_nonfinite
from .folder_lock import lock_folder, unlock_folder
from .host_state import is_key, places_of, to_host, to_ranks, without_owned

FORMAT = 1
"""Of the checkpoints that this version writes; it reads all up to it."""

_UNREADABLE = (ValueError, LookupError, TypeError, FileNotFoundError, RecursionError)  # seen on damaged files
_MOST_METADATA_BYTES = 2**28
_ANSWER_S = 1200  # for process 0 to begin or finish a save

_OWNERS = {"params": ("parameter", "model"), "opt_state": ("optimizer state", "optimizer"),
           "model_state": ("model state", "model")}  # fmt: skip
Row = Mapping[str, Any]
"""``shape, dtype, crc32`` of one leaf, and ``impl`` of an RNG key."""


# Pythons that start no thread once the main thread has ended (cpython#113964): a write that goes on then would fail.
_ENDS_WITHOUT_THREADS = (3, 12) <= sys.version_info < (3, 12, 3)
_locks: dict[Path, Any] = {}  # of each folder: objects of this process and their threads take turns
_unfinished: set[Checkpoints] = set()  # those that may still be writing
_reserving: set[Checkpoints] = set()  # those that hold the lock of their folder until they are closed
_numbers = itertools.count()  # of saves: the same in all processes


class _Write(NamedTuple):
    """A save that is being written, or was since the last ``wait``."""

    step: int | None  # None of one that is set aside
    error: Callable[[], Exception | None]  # waits until it is written
    has_failed: Callable[[], bool]  # does not wait; known to process 0


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def one_at_a_time(self: Checkpoints, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return one_at_a_time


class Checkpoints(CheckpointFolder):
    """The checkpoints in one folder; a context manager that finishes the last write at its end.

    Without ``with`` or ``close`` the end of the interpreter finishes it; Python 3.12.0 to 3.12.2 could not, so there a
    save returns once it is written. Threads, and objects of one folder, may save
    at the same time in one process; they take turns.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, jaxddp
        >>> from jaxddp.checkpoint import Checkpoints
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> params = {"w": jnp.zeros((3, 1))}
        >>> batch = {"x": jnp.ones((12, 3)), "y": jnp.ones((12, 1))}
        >>> on_4 = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(4))
        >>> on_3 = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.bucketed(), jaxddp.data_mesh(3))
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        ...     state, _ = on_4.step(on_4.init(params), batch)
        ...     checkpoints.save(on_4, state, data_position=12)
        ...     state, data_position = checkpoints.restore(on_3, params)
        >>> int(state.step), data_position
        (1, 12)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        check_finite: bool = True,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Opens a folder, and creates it if needed.

        Args:
            directory: The folder; on a shared file system if several processes train together. What else it holds is
                left alone.
            keep: Checkpoints to keep; older ones are removed.
            check_finite: Whether ``save`` refuses parameters and arrays of the optimizer state that hold NaN or
                infinity.
            warn: Gets a line about each damaged checkpoint for which an older one is taken.

        Raises:
            ValueError: If ``keep`` is not positive, or the folder is a file or "".
            OSError: If it cannot be created.
        """
        check_flag(check_finite=check_finite)
        check_function("warn", warn, "a function of a line")
        super().__init__(directory, keep, warn)
        self._check_finite = check_finite
        handlers = ocp.type_handlers
        # Only NumPy arrays are written, but Orbax warns about a registry without JAX's.
        registry = handlers.create_type_handler_registry(
            (np.ndarray, _HostArrays()), (jax.Array, handlers.ArrayHandler())
        )
        # Orbax would let processes wait for each other, 20 minutes for one that failed.
        index = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"jaxddp-{index}"
        )
        state = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=alone)
        about = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
        # Threads that wait for folders to be made asynchronously would wait for 20 minutes where one cannot be.
        folders_first = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.CompositeOptions(multiprocessing_options=alone, async_options=folders_first)
        self._checkpointer = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(composite_options=options, state=state, about=about),
            multiprocessing_options=alone,
        )
        self._writing: _Write | None = None
        self._lock = _locks.setdefault(self.directory, threading.RLock())

    @_in_turn
    def reserve(self) -> None:
        """Locks the folder until ``close``, so that no other job saves there, not only while this one does.

        Raises:
            ValueError: If another job has locked it.
            OSError: If it cannot be written.
        """
        self._on_first(self._lock_folder)
        _reserving.add(self)

    @_in_turn
    def save(self, trainer: Trainer, state: TrainState, *, data_position: Any = None, set_aside: bool = False) -> None:
        """Saves a state under its step: returns once it is copied, and writes in the background.

        Waits for an earlier save that is still being written.

        Args:
            trainer: The state's trainer.
            state: May be donated to the next step as soon as this returns.
            data_position: Where to continue in the data, as a JSON value.
            set_aside: Writes it as ``set_aside`` leaves one: no checkpoint is removed for it, and none restores it.

        Raises:
            ValueError: If the state was donated, another job is writing to the folder, it has a checkpoint of this or a
                later step or something else of that name, or the position is not JSON.
            FloatingPointError: If the state is not finite, with ``check_finite``.
            OSError: If the folder cannot be written, or the earlier save failed.
        """
        check_kind("trainer", trainer, Trainer, "a jaxddp.Trainer")
        check_flag(set_aside=set_aside)
        check_state(state)
        check_alive(state)
        try:
            data_position = json.loads(json.dumps(data_position))
        except (TypeError, ValueError) as error:
            raise ValueError(f"data_position (={data_position!r}) must be JSON: {error}") from error
        step, key = int(state.step), f"jaxddp/checkpoint/{next(_numbers)}"
        path = self.aside_path(step) if set_aside else self._path(step)
        _on_first(f"{key}/begin", functools.partial(self._begin, step, path))
        try:
            items = self._items(trainer, state, data_position)
        except BaseException:
            self._unlock_folder()
            raise
        if jax.process_index():
            self._writing = _Write(None if set_aside else step, lambda: _answer(f"{key}/end"), lambda: False)
            return
        _unfinished.add(self)
        thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        written = thread.submit(_on_first, f"{key}/end", functools.partial(self._write, step, path, items))
        thread.shutdown(wait=False)
        if _ENDS_WITHOUT_THREADS:
            concurrent.futures.wait([written])
        # The thread raises nothing but exceptions: Ctrl-C is the main thread's.
        raised = cast(Callable[[], Exception | None], written.exception)
        has_failed = lambda: written.done() and written.exception() is not None  # noqa: E731
        self._writing = _Write(None if set_aside else step, raised, has_failed)

    @_in_turn
    def set_aside(self, step: int) -> str | None:
        """As ``CheckpointFolder.set_aside``, once the last save is written."""
        self.wait()
        return super().set_aside(step)

    def _on_first(self, function: Callable[[], None]) -> None:
        _on_first(f"jaxddp/checkpoint/{next(_numbers)}", function)

    def _remove_aside(self) -> None:
        for earlier in filter(_is_ours, self.directory.glob("*.nonfinite")):
            earlier.rename(earlier.with_name(f"{earlier.name}.removed"))
        self._remove_renamed()

    def _begin(self, step: int, path: Path) -> None:
        """Makes way for a save, in process 0: raises if there is none."""
        for other in [one for one in _unfinished if one.directory == self.directory]:
            other.wait()  # the host never holds two copies, and no step is written twice
        self._lock_folder()
        try:
            self._make_way(step, path == self.aside_path(step))
            if os.path.lexists(path):  # Orbax would remove it
                raise ValueError(f"{str(path)!r} is no checkpoint: save into another folder, or rename it")
        except BaseException:
            self._unlock_folder()
            raise

    def _items(self, trainer: Trainer, state: TrainState, data_position: Any) -> ocp.args.Composite:
        """Copies a state to the host, and describes it."""
        is_writer = jax.process_index() == 0  # the others only help to gather
        arrays, nonfinite = {}, []
        for name, array in to_host(trainer, state):
            if self._check_finite and not _is_finite(name, array):
                nonfinite.append(name)
            arrays[name] = array if is_writer else np.zeros(1)
        refuse_nonfinite(int(state.step), nonfinite)
        leaves, places = named_leaves(without_owned(trainer, state)), named_leaves(places_of(trainer, state))
        about = {
            "format": FORMAT,
            "step": int(state.step),
            "strategy": trainer.strategy.name,
            "num_ranks": trainer.num_ranks,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "data_position": data_position,
            "leaves": {name: _describe(leaves.get(name, place), place, arrays[name]) for name, place in places.items()},
        }
        return ocp.args.Composite(
            state=ocp.args.PyTreeSave({name: array for name, array in arrays.items() if array.size}),
            about=ocp.args.JsonSave(about | {"crc32": _checksum(about)}),
        )

    def _write(self, step: int, path: Path, items: ocp.args.Composite) -> None:
        """Writes a checkpoint, then removes the oldest ones; in a thread of process 0."""
        try:
            self._checkpointer.save(path, args=items)
        except Exception as error:
            self._remove_partial(path.name)  # a full disk must not stay full
            number = re.search(r"os_error_code='(\d+)'", str(error))  # TensorStore repeats every path
            reason = os.strerror(int(number[1])) if number else " ".join(str(error).split())
            raise OSError(f"{self._name(step)} was not saved: {reason}") from error
        ours = [one for one in sorted(_steps_in(self.directory)) if _is_ours(self._path(one))]
        for old in ours[: -self._keep] if path == self._path(step) else ():
            self._path(old).rename(self.directory / f"{old}.removed")  # in one go: none is ever half there
        self._remove_renamed()

    def _remove_renamed(self) -> None:
        for removed in filter(_is_ours, self.directory.glob("*.removed")):  # also of a process that was killed here
            shutil.rmtree(removed / "state", ignore_errors=True)  # first, and what marks it as ours last
            shutil.rmtree(removed)

    def _remove_partial(self, name: str) -> None:
        num_without = 0
        for _ in range(50):  # Orbax may have threads left that still write
            found = list(self.directory.glob(f"{name}.orbax-checkpoint-tmp*"))
            num_without = 0 if found else num_without + 1
            if num_without == 3:
                return
            for partial in found:
                shutil.rmtree(partial, ignore_errors=True)
            time.sleep(0.05)

    @_in_turn
    def restore(
        self, trainer: Trainer, params: Any, *, model_state: Any = None, step: int | None = None
    ) -> tuple[TrainState, Any]:
        """Restores a state for a trainer's ranks and strategy.

        Args:
            trainer: May have other ranks and another strategy than the trainer that saved.
            params: The model's parameters, for their names, shapes and dtypes: arrays or ``jax.ShapeDtypeStruct``.
                Dtypes may be wider than those saved, never narrower.
            model_state: The same of the model state, with ``has_state``.
            step: Of the checkpoint; the newest if None.

        Returns:
            The state, and the data position saved with it.

        Raises:
            ValueError: If there is no such checkpoint; if it is of another model or optimizer, of wider dtypes,
                damaged, or written by a newer version. Checkpoints are never changed.
        """
        check_kind("trainer", trainer, Trainer, "a jaxddp.Trainer")
        self.wait()
        if step is None:
            return self._newest(functools.partial(self._restore, trainer, params, model_state))
        return self._restore(trainer, params, model_state, step)

    def _restore(self, trainer: Trainer, params: Any, model_state: Any, step: int) -> tuple[TrainState, Any]:
        about = self._about(step)
        name = self._name(step)
        _check_model(name, about["leaves"], params)  # first, so that the trainer never sees another model
        state = trainer.abstract_state(params, model_state)
        _check_fits(name, about["leaves"], places_of(trainer, state))
        impls = {name: row["impl"] for name, row in about["leaves"].items() if "impl" in row}
        return to_ranks(trainer, state, self._read(about), impls), about["data_position"]

    @_in_turn
    def restore_params(
        self, params: Any, *, fresh: Sequence[str] = (), model_state: Any = None, step: int | None = None
    ) -> Any:
        """Restores parameters alone, for another optimizer, a model with other parts, or to evaluate.

        Args:
            params: The model's parameters, for their names, shapes and dtypes: arrays or ``jax.ShapeDtypeStruct``.
                Dtypes may be wider than those saved, never narrower.
            fresh: Names of leaves, or of what contains them, that are taken from ``params`` instead, such as a new
                ``head``; the checkpoint may lack them, and what else it has is left there.
            model_state: The model's state, which is restored too: as ``params``, with all of its leaves saved.
            step: Of the checkpoint; the newest if None.

        Returns:
            A tree like ``params`` of NumPy arrays, and JAX's PRNG keys, for ``Trainer.init``; with a ``model_state``
            that tree and one like it.

        Raises:
            ValueError: If a name in ``fresh`` names none of ``params`` or one without values, another leaf is missing
                in the checkpoint, has another shape or a wider dtype there, or as ``restore``.
        """
        is_sequence = isinstance(fresh, Sequence) and not isinstance(fresh, (str, bytes))
        if not is_sequence or not all(isinstance(one, str) for one in fresh):
            raise ValueError(f"fresh (={fresh!r}) must be a sequence of names")
        self.wait()

        def read(step: int) -> Any:
            found = self._restore_tree("params", params, tuple(fresh), step)
            return found if model_state is None else (found, self._restore_tree("model_state", model_state, (), step))

        return self._newest(read) if step is None else read(step)

    def _restore_tree(self, owner: str, params: Any, fresh: tuple[str, ...], step: int) -> Any:
        about, leaves = self._about(step), named_leaves({owner: params})
        kept: set[str] = set()
        for one in fresh:
            named = {name for name in leaves if f"{name}.".startswith(f"params.{one}.")}
            if not named or any(isinstance(leaves[name], jax.ShapeDtypeStruct) for name in named):
                names = ", ".join(named_leaves(params))
                raise ValueError(f"fresh (={one!r}) must name leaves of params that have values: {names}")
            kept |= named
        wanted = jax.tree.unflatten(
            jax.tree.structure(params), [None if name in kept else leaf for name, leaf in leaves.items()]
        )
        saved = {name: row for name, row in about["leaves"].items() if name in leaves and name not in kept}
        checkpoint = self._name(step)
        _check_shapes(checkpoint, owner, saved, wanted)
        _check_dtypes(checkpoint, saved, leaves)
        arrays = self._read({**about, "leaves": saved})

        def restored(name: str, leaf: Any) -> Any:
            if name in kept:
                return leaf if is_key(leaf) else np.asarray(leaf)
            if is_key(leaf):
                return jax.random.wrap_key_data(jnp.asarray(arrays[name]), impl=saved[name]["impl"])
            return arrays[name].astype(leaf.dtype)

        found = [restored(name, leaf) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(params), found)

    @_in_turn
    def about(self, step: int | None = None) -> dict[str, Any]:
        """Describes a checkpoint without reading its arrays.

        Args:
            step: Of the checkpoint; the newest that can be read if None.

        Returns:
            ``format, step, strategy, num_ranks, saved_at, data_position``, and ``leaves``: ``shape, dtype, crc32`` by
            name.

        Raises:
            ValueError: If there is no such checkpoint, or it is damaged or written by a newer version.
        """
        self.wait()
        return self._newest(self._about) if step is None else self._about(step)

    def _about(self, step: int) -> dict[str, Any]:
        steps = self.steps()
        if step not in steps:
            raise ValueError(f"no {self._name(step)}: there are {', '.join(map(str, steps))}")
        try:
            about = _metadata(self._path(step))
            written = about["format"]
        except (*_UNREADABLE, OSError) as error:
            raise self._damage(step) from error
        if isinstance(written, int) and written > FORMAT:
            raise ValueError(f"{self._name(step)} has format {written}, newer than {FORMAT}: update jaxddp")
        if about.pop("crc32", None) != _checksum(about) or not _is_description(about):
            raise self._damage(step)
        if about["step"] != step:
            raise ValueError(f"{self._name(step)} is that of step {about['step']}: remove or rename its folder")
        return about

    @_in_turn
    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints, oldest first, including one being written."""
        found = _steps_in(self.directory)
        writing = None if self._writing is None else self._writing.step
        return sorted(found if writing is None else found | {writing})

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed, as ``wait``, ``close`` and the next ``save`` raise; known to process 0 alone."""
        return self._writing is not None and self._writing.has_failed()

    @_in_turn
    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            OSError: If a save failed.
        """
        if self._writing is None:
            return
        try:
            error = self._writing.error()
        except KeyboardInterrupt:
            self._writing.error()  # the process could not end before either
            raise
        self._writing = None
        _unfinished.discard(self)
        self._unlock_folder()
        if error is not None:
            raise error

    @_in_turn
    def close(self) -> None:
        """Waits, and stops the writer; the object cannot be used afterwards.

        Raises:
            OSError: If a save failed.
        """
        try:
            self.wait()
        finally:
            _reserving.discard(self)
            self._unlock_folder()
            self._checkpointer.close()

    def _lock_folder(self) -> None:
        lock_folder(self.directory)

    def _unlock_folder(self) -> None:
        if not any(one.directory == self.directory for one in _unfinished | _reserving):
            unlock_folder(self.directory)

    def _read(self, about: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Reads the arrays of a checkpoint that ``about`` describes."""
        step, leaves = about["step"], about["leaves"]
        stored = {
            name: ocp.RestoreArgs(restore_type=np.ndarray) for name, row in leaves.items() if 0 not in row["shape"]
        }
        args = ocp.args.PyTreeRestore(item=dict.fromkeys(stored, 0), restore_args=stored, partial_restore=True)
        try:
            items = ocp.args.Composite(state=args)
            found = self._checkpointer.restore(self._path(step), args=items).state if stored else {}  # Orbax wants one
        except _UNREADABLE as error:
            raise self._damage(step) from error
        if not all(isinstance(found[name], np.ndarray) for name in stored):  # what Orbax does not find stays the item's
            raise self._damage(step)
        arrays = {name: found[name] if name in stored else np.zeros(row["shape"]) for name, row in leaves.items()}
        # Orbax does not notice changed bytes inside an array, and reads missing ones as zeros.
        if any(_checksum(arrays[name]) != leaves[name]["crc32"] for name in stored):
            raise self._damage(step)
        return arrays


class _HostArrays(ocp.type_handlers.NumpyHandler):
    """Writes arrays without another copy, and reads them one at a time."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def _background_serialize(self, *args: Any) -> None:
        try:
            await super()._background_serialize(*args)
        finally:  # when one write fails, the others would outlive their event loop and print tracebacks
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> list[np.ndarray]:
        # Read together, the others would print tracebacks when one fails.
        args = args or [None] * len(infos)
        arrays = []
        for info, arg in zip(infos, args, strict=True):
            arrays += await super().deserialize([info], arg and [arg])
        return arrays


def _on_first(key: str, function: Callable[[], None]) -> None:
    """Runs a function in process 0; all processes that call this raise what it raises."""
    if jax.process_count() == 1:
        function()
    elif jax.process_index():
        if (raised := _answer(key)) is not None:
            raise raised
    else:
        answer: tuple[str, str] | None = None
        try:
            function()
        except BaseException as error:
            answer = type(error).__name__, str(error)
            raise
        finally:
            _store().key_value_set(key, json.dumps(answer), allow_overwrite=True)


def _answer(key: str) -> Exception | None:
    """What process 0 raised."""
    answer = json.loads(_store().blocking_key_value_get(key, 1000 * _ANSWER_S))
    if answer is None:
        return None
    name, text = answer
    return ValueError(text) if name == "ValueError" else OSError(text)


def _store() -> Any:
    return distributed.global_state.client


def _steps_in(directory: Path) -> set[int]:
    """Steps of the folders that look like checkpoints, damaged or not."""
    if not directory.is_dir():
        return set()
    named = {path for path in directory.iterdir() if path.name.isdecimal() and path.name == str(int(path.name))}
    return {int(path.name) for path in named if (path / "about").exists() or (path / "state").exists()}


def _is_ours(checkpoint: Path) -> bool:
    """Whether a folder holds what this program writes, which alone it removes."""
    try:
        return _metadata(checkpoint).keys() >= {"format", "step", "leaves", "crc32"}
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _metadata(checkpoint: Path) -> Any:
    """Reads the description of a checkpoint.

    Raises:
        ValueError: If it is no JSON, or there is something else than files and folders, which could be read for ever.
        RecursionError: If it is nested deeply.
        OSError: If it cannot be read.
    """
    if not all(path.is_file() or path.is_dir() for path in checkpoint.rglob("*")):
        raise ValueError("no file and no folder")
    path = checkpoint / "about" / "metadata"
    if path.stat().st_size > _MOST_METADATA_BYTES:
        raise ValueError("too large")
    return json.loads(path.read_bytes())


def _is_description(about: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is described as ``save`` does it."""

    def is_row(row: Any) -> bool:
        if not isinstance(row, dict) or not isinstance(row.get("shape"), list):
            return False
        if not all(type(size) is int and size >= 0 for size in row["shape"]) or type(row.get("crc32")) is not int:
            return False
        if "impl" in row:
            return isinstance(row["impl"], str)
        try:
            return isinstance(row.get("dtype"), str) and jnp.dtype(row["dtype"]) is not None
        except TypeError:
            return False

    leaves = about.get("leaves")
    if not isinstance(leaves, dict) or not leaves.keys() >= {"step", "key"}:
        return False
    return about.keys() >= {"step", "data_position"} and all(map(is_row, leaves.values()))


def _is_finite(name: str, array: np.ndarray) -> bool:
    """Whether a leaf has no NaN or infinity; scalars of an optimizer may, such as the best loss so far."""
    is_checked = array.ndim > 0 or name.startswith("params")
    return not is_checked or not jnp.issubdtype(array.dtype, jnp.floating) or bool(np.isfinite(array).all())


def _describe(leaf: Any, where: Leaf, array: np.ndarray) -> Row:
    """The row of a saved leaf: ``leaf`` over the ranks, if it is one there, ``where`` and ``array`` on the host."""
    row = {"shape": list(where.shape), "dtype": str(where.dtype), "crc32": _checksum(array)}
    return row | {"impl": str(jax.random.key_impl(leaf))} if is_key(leaf) else row


def _checksum(data: np.ndarray | dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(data).encode() if isinstance(data, dict) else data.reshape(-1).view(np.uint8).data)


def _check_model(checkpoint: str, saved: Mapping[str, Row], params: Any) -> None:
    """Raises ValueError, naming the first difference, if parameters have other names or shapes."""
    _check_shapes(checkpoint, "params", saved, params)


def _check_fits(checkpoint: str, saved: Mapping[str, Row], places: TrainState) -> None:
    """Raises ValueError, naming the first leaf, if the optimizer state differs or a dtype of ``places`` is narrower."""
    _check_shapes(checkpoint, "opt_state", saved, places.opt_state)
    if jax.tree.leaves(places.model_state):  # one that is not asked for stays in the checkpoint
        _check_shapes(checkpoint, "model_state", saved, places.model_state)
    _check_dtypes(checkpoint, saved, named_leaves(places))


def _check_dtypes(checkpoint: str, saved: Mapping[str, Row], wanted: Mapping[str, Any]) -> None:
    for name, row in saved.items():
        owner, _, leaf_name = name.partition(".")
        if owner not in _OWNERS or name not in wanted or _holds(wanted[name], row):
            continue
        remedies = {"params": "params", "opt_state": "an optimizer", "model_state": "a model state"}
        raise ValueError(
            f"{checkpoint} has {_OWNERS[owner][0]} {leaf_name!r} in {row['dtype']}, of which {wanted[name].dtype} here "
            f"would lose bits: restore with {remedies[owner]} of {row['dtype']}"
        )


def _check_shapes(checkpoint: str, owner: str, saved: Mapping[str, Row], wanted: Any) -> None:
    what, whole = _OWNERS[owner]
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
        raise ValueError(
            f"{checkpoint} is of another {whole}: {what} {name.partition('.')[2]!r} is {there} there and {here} here"
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
