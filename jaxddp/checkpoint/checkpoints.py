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

A save copies the state to the host, leaf by leaf, and returns. Orbax writes it in the background and renames the folder
when it is complete, so a checkpoint is never partial; older ones are removed afterwards. With several processes, one
writes and all read. While it writes, it locks ``DIR/.writer``, so that no other job does. Nothing is pickled.

A checkpoint fits if its parameters and optimizer state have the expected names and shapes, and dtypes that lose
nothing: bfloat16 may be restored as float32, as under a strategy with wide masters, but not the other way round.

Assumptions: the host has memory for the state. With several processes, each leaf in turn is gathered on every device
while it is copied to the host; with one process no device holds more than its shards.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import LatestN

from ..training.state_layout import Leaf
from ..training.train import Trainer, TrainState
from ..training.validation import check_alive
from ..tree import named_leaves
from .host_state import is_key, places_of, to_host, to_ranks

FORMAT = 1
"""Of the checkpoints that this version writes; it reads all up to it."""

_UNREADABLE = (ValueError, LookupError, TypeError, FileNotFoundError)  # seen from Orbax on damaged files

_OWNERS = {"params": ("parameter", "model"), "opt_state": ("optimizer state", "optimizer")}
Row = Mapping[str, Any]
"""``shape, dtype, crc32`` of one leaf, and ``impl`` of an RNG key."""


_locks: dict[Path, Any] = {}  # of each folder: objects of this process and their threads take turns
_unfinished: set[Checkpoints] = set()  # those that may still be writing
_writer_files: dict[Path, Any] = {}  # the locked file of each folder that this process writes to


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def one_at_a_time(self: Checkpoints, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return one_at_a_time


class Checkpoints:
    """The checkpoints in one folder; a context manager that finishes the last write at its end.

    Without ``with`` or ``close`` the end of the interpreter finishes it. Threads, and objects of one folder, may save
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

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        """Opens a folder, and creates it if needed.

        Args:
            directory: The folder; on a shared file system if several processes train together.
            keep: Checkpoints to keep; older ones are removed.

        Raises:
            ValueError: If ``keep`` is not positive, or the folder is a file.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep (={keep!r}) must be a positive integer")
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"directory (={str(self.directory)!r}) must be a folder, it is a file")
        handlers = ocp.type_handlers
        # Only NumPy arrays are written, but Orbax warns about a registry without JAX's.
        registry = handlers.create_type_handler_registry(
            (np.ndarray, _HostArrays()), (jax.Array, handlers.ArrayHandler())
        )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(preservation_policy=LatestN(keep), lightweight_initialize=True),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
                "about": ocp.JsonCheckpointHandler(),
            },
        )
        self._lock = _locks.setdefault(self.directory, threading.RLock())

    def __enter__(self) -> Checkpoints:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Finishes writing, and closes."""
        self.close()

    @_in_turn
    def save(self, trainer: Trainer, state: TrainState, *, data_position: Any = None) -> None:
        """Saves a state under its step: returns once it is copied, and writes in the background.

        Waits for an earlier save that is still being written.

        Args:
            trainer: The state's trainer.
            state: May be donated to the next step as soon as this returns.
            data_position: Where to continue in the data, as a JSON value.

        Raises:
            ValueError: If the state was donated, another job is writing to the folder, it has a checkpoint of this or a
                later step, or the position is not JSON.
            Exception: If the earlier save failed.
        """
        check_alive(state)
        for other in [one for one in _unfinished if one.directory == self.directory]:
            other.wait()  # the host never holds two copies, and no step is written twice
        self._lock_folder()
        try:
            self._save(trainer, state, data_position)
        finally:
            self._unlock_folder()

    def _save(self, trainer: Trainer, state: TrainState, data_position: Any) -> None:
        step, steps = int(state.step), self.steps()
        if steps and step <= steps[-1]:
            raise ValueError(
                f"step (={step}) must be above {steps[-1]}, that of the newest checkpoint {self._where}: save into "
                f"another folder, or remove those of step {step} and later"
            )
        try:
            data_position = json.loads(json.dumps(data_position))
        except (TypeError, ValueError) as error:
            raise ValueError(f"data_position (={data_position!r}) must be JSON: {error}") from error
        is_writer = jax.process_index() == 0  # the others only help to gather
        arrays = {name: array if is_writer else np.zeros(1) for name, array in to_host(trainer, state)}
        leaves, places = named_leaves(state), named_leaves(places_of(trainer, state))
        about = {
            "format": FORMAT,
            "step": step,
            "strategy": trainer.strategy.name,
            "num_ranks": trainer.num_ranks,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "data_position": data_position,
            "leaves": {name: _describe(leaves[name], place, arrays[name]) for name, place in places.items()},
        }
        items = {
            "state": ocp.args.PyTreeSave({name: array for name, array in arrays.items() if array.size}),
            "about": ocp.args.JsonSave(about | {"crc32": _checksum(about)}),
        }
        # In a thread, because Ctrl-C would leave Orbax's own threads waiting forever.
        _unfinished.add(self)
        with ThreadPoolExecutor(max_workers=1) as thread:
            thread.submit(self._manager.save, step, args=ocp.args.Composite(**items)).result()

    @_in_turn
    def restore(self, trainer: Trainer, params: Any, *, step: int | None = None) -> tuple[TrainState, Any]:
        """Restores a state for a trainer's ranks and strategy.

        Args:
            trainer: May have other ranks and another strategy than the trainer that saved.
            params: The model's parameters, for their names, shapes and dtypes: arrays or ``jax.ShapeDtypeStruct``.
                Dtypes may be wider than those saved, never narrower.
            step: Of the checkpoint; the newest if None.

        Returns:
            The state, and the data position saved with it.

        Raises:
            ValueError: If there is no such checkpoint; if it is of another model or optimizer, of wider dtypes,
                damaged, or written by a newer version. Checkpoints are never changed.
        """
        about = self.about(step)
        name = f"checkpoint of step {about['step']} {self._where}"
        _check_model(name, about["leaves"], params)  # first, so that the trainer never sees another model
        state = trainer.abstract_state(params)
        _check_fits(name, about["leaves"], places_of(trainer, state))
        impls = {name: row["impl"] for name, row in about["leaves"].items() if "impl" in row}
        return to_ranks(trainer, state, self._read(about), impls), about["data_position"]

    @_in_turn
    def about(self, step: int | None = None) -> dict[str, Any]:
        """Describes a checkpoint without reading its arrays.

        Returns:
            ``format, step, strategy, num_ranks, saved_at, data_position``, and ``leaves``: ``shape, dtype, crc32`` by
            name.

        Raises:
            ValueError: If there is no such checkpoint, or it is damaged or written by a newer version.
        """
        self.wait()
        steps = self.steps()
        if not steps:
            raise ValueError(f"no checkpoint in {str(self.directory)!r}")
        if step is None:
            step = steps[-1]
        if step not in steps:
            raise ValueError(f"no checkpoint of step {step} {self._where}: there are {', '.join(map(str, steps))}")
        try:
            about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
            written = about["format"]
        except _UNREADABLE as error:
            raise self._damaged(step) from error
        if isinstance(written, int) and written > FORMAT:
            raise ValueError(
                f"checkpoint of step {step} {self._where} has format {written}, newer than {FORMAT}: update jaxddp"
            )
        if about.pop("crc32", None) != _checksum(about):
            raise self._damaged(step)
        if about["step"] != step:
            raise ValueError(
                f"checkpoint of step {step} {self._where} is that of step {about['step']}: remove or rename its folder"
            )
        return about

    @_in_turn
    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints, oldest first, including one being written."""
        if not self._manager.is_saving_in_progress():
            self._manager.reload()  # another process may have saved or removed some
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Returns the step of the newest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    @_in_turn
    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            Exception: If a save failed.
        """
        _unfinished.discard(self)
        try:
            self._manager.wait_until_finished()
        finally:
            self._unlock_folder()

    @_in_turn
    def close(self) -> None:
        """Waits, and stops the writer; the object cannot be used afterwards."""
        _unfinished.discard(self)
        try:
            self._manager.close()
        finally:
            self._unlock_folder()

    def _lock_folder(self) -> None:
        """Locks the folder for this job, whose process 0 holds the lock for all.

        Raises:
            ValueError: If another job has locked it.
        """
        holder = b"" if jax.process_index() else _lock(self.directory).encode()[:200]
        if jax.process_count() > 1:  # all raise, or the others would wait for process 0
            said = multihost_utils.broadcast_one_to_all(np.frombuffer(holder.ljust(200), np.uint8))
            holder = np.asarray(said, np.uint8).tobytes()
        if holder.strip():
            raise ValueError(
                f"directory (={str(self.directory)!r}) is being written to by {holder.decode().strip()}: let that"
                " finish, or save into another folder"
            )

    def _unlock_folder(self) -> None:
        if not any(one.directory == self.directory for one in _unfinished):
            file = _writer_files.pop(self.directory, None)
            if file is not None:
                Path(file.name).unlink(missing_ok=True)
                file.close()

    @property
    def _where(self) -> str:
        return f"in {str(self.directory)!r}"

    def _damaged(self, step: int) -> ValueError:
        return ValueError(
            f"checkpoint of step {step} {self._where} is damaged or half-written: remove it to go on from an older one"
        )

    def _read(self, about: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Reads all arrays of a checkpoint."""
        step, leaves = about["step"], about["leaves"]
        stored = {
            name: ocp.RestoreArgs(restore_type=np.ndarray) for name, row in leaves.items() if 0 not in row["shape"]
        }
        args = ocp.args.PyTreeRestore(item=dict.fromkeys(stored, 0), restore_args=stored)
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(state=args)).state
        except _UNREADABLE as error:
            raise self._damaged(step) from error
        arrays = {name: found[name] if name in stored else np.zeros(row["shape"]) for name, row in leaves.items()}
        # Orbax does not notice changed bytes inside an array, and reads missing ones as zeros.
        if any(_checksum(arrays[name]) != leaves[name]["crc32"] for name in stored):
            raise self._damaged(step)
        return arrays


class _HostArrays(ocp.type_handlers.NumpyHandler):
    """Writes arrays without another copy, and reads them one at a time."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> list[np.ndarray]:
        # Read together, the others would print tracebacks when one fails.
        args = args or [None] * len(infos)
        arrays = []
        for info, arg in zip(infos, args, strict=True):
            arrays += await super().deserialize([info], arg and [arg])
        return arrays


def _lock(directory: Path) -> str:
    """Locks a folder for this process; returns who else has locked it, "" if nobody.

    The system drops the lock of a process that ends.
    """
    directory.mkdir(parents=True, exist_ok=True)
    while directory not in _writer_files:
        file = open(directory / ".writer", "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                return file.read() or "another process"
        except OSError:
            pass  # a file system without locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):  # else its holder has just removed it
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                _writer_files[directory] = file
    return ""


def _describe(leaf: jax.Array, where: Leaf, array: np.ndarray) -> Row:
    """The row of a saved leaf: ``leaf`` over the ranks, ``where`` and ``array`` on the host."""
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
    wanted = named_leaves(places)
    for name, row in saved.items():
        owner, _, leaf_name = name.partition(".")
        if owner not in _OWNERS or _holds(wanted[name], row):
            continue
        remedy = "params (or a master_dtype)" if owner == "params" else "an optimizer"
        raise ValueError(
            f"{checkpoint} has {_OWNERS[owner][0]} {leaf_name!r} in {row['dtype']}, of which {wanted[name].dtype} here "
            f"would lose bits: restore with {remedy} of {row['dtype']}"
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


def _holds(leaf: Leaf, row: Row) -> bool:
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
            print(f"checkpoint in {one.directory} was not saved: {type(error).__name__}: {error}", file=sys.stderr)


# Before concurrent.futures refuses new work, without which no write ends: atexit would be too late.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
