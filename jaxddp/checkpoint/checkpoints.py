"""Saves training states, and restores them on any number of ranks and under any strategy.

What is saved knows of no ranks: every leaf whole, in its own shape, without padding, under its name in the state, such
as ``params.head.kernel`` or ``opt_state.0.mu.head.kernel``. To restore is to cut it for the ranks at hand.

    =================  =====================================================================================
    in DIR/120         holds
    =================  =====================================================================================
    ``state/``         the arrays of the state of step 120, by name, as Orbax writes arrays; those of no elements are
                       left out
    ``about/metadata`` JSON: format, step, strategy, number of ranks, when, position in the data, and for each leaf
                       its shape, dtype and checksum
    =================  =====================================================================================

A save copies the state to the host, leaf by leaf, and returns; Orbax writes it behind the steps that follow, beside the
checkpoints that are there, and renames it when it is whole. So a checkpoint is there as a whole or not at all, and the
older ones are removed only after. Of several processes, one writes, and all read. Nothing is pickled.

Assumptions: the host has memory for the state. With several processes each leaf in turn is whole on every device while
it is brought to the host; with one process no device holds more than its shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

from ..training.train import Trainer, TrainState
from ..training.validation import check_alive
from ..tree import named_leaves
from .host_state import places_of, to_host, to_ranks
from .leaves import check_fits, check_model, checksum, describe

FORMAT = 1
"""Of the checkpoints that this version writes; it reads all up to it."""

_UNREADABLE = (ValueError, LookupError, TypeError, FileNotFoundError)  # what Orbax was seen to raise of damaged files


class Checkpoints:
    """The checkpoints in one folder: a context manager, at whose end the last one is written.

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
        """Opens a folder, and makes it if it is not there.

        Args:
            directory: The folder; shared, where several processes train together.
            keep: How many checkpoints to keep; older ones are removed.

        Raises:
            ValueError: If ``keep`` is not positive, or the folder is a file.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep (={keep!r}) must be a positive integer")
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"directory (={str(self.directory)!r}) must be a folder, it is a file")
        handlers = ocp.type_handlers
        # Only arrays of NumPy are written; Orbax warns of a registry without JAX's.
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

    def __enter__(self) -> Checkpoints:
        """Gives itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for what is being written, and closes."""
        self.close()

    def save(self, trainer: Trainer, state: TrainState, *, data_position: Any = None) -> None:
        """Saves a state under its step; returns when it is copied, and writes it meanwhile.

        An earlier save that is still being written is waited for.

        Args:
            trainer: Whose state it is.
            state: May be donated to the next step as soon as this returns.
            data_position: What tells where to go on in the data, as JSON has it: a number, text, a list, a dictionary.

        Raises:
            ValueError: If the state was donated, the folder has a checkpoint of its step or of a later one, or the
                position is not JSON.
            Exception: What kept the earlier save from being written.
        """
        check_alive(state)
        self.wait()  # so that the host never holds two
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
        is_writer = jax.process_index() == 0  # the others need not keep what they helped to gather
        arrays = {name: array if is_writer else np.zeros(1) for name, array in to_host(trainer, state)}
        leaves, places = named_leaves(state), named_leaves(places_of(trainer, state))
        about = {
            "format": FORMAT,
            "step": step,
            "strategy": trainer.strategy.name,
            "num_ranks": trainer.num_ranks,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "data_position": data_position,
            "leaves": {name: describe(leaves[name], place, arrays[name]) for name, place in places.items()},
        }
        items = {
            "state": ocp.args.PyTreeSave({name: array for name, array in arrays.items() if array.size}),
            "about": ocp.args.JsonSave(about | {"crc32": checksum(about)}),
        }
        # In a thread, which Ctrl-C does not interrupt: what Orbax has started by then would wait for the rest for ever.
        with ThreadPoolExecutor(max_workers=1) as thread:
            thread.submit(self._manager.save, step, args=ocp.args.Composite(**items)).result()

    def restore(self, trainer: Trainer, params: Any, *, step: int | None = None) -> tuple[TrainState, Any]:
        """Restores a state for the ranks and the strategy of a trainer.

        Args:
            trainer: That goes on; its ranks and strategy may be others than those that saved.
            params: The model's parameters, for their names, shapes and dtypes: arrays or ``jax.ShapeDtypeStruct``.
                Dtypes may be wider than those saved, never narrower.
            step: Of which checkpoint; the newest if None.

        Returns:
            The state, and the position in the data that was saved with it.

        Raises:
            ValueError: If there is no such checkpoint; if it is of another model or another optimizer, of wider
                dtypes, damaged, or written by a newer version. No checkpoint is changed by it.
        """
        about = self.about(step)
        name = f"checkpoint of step {about['step']} {self._where}"
        check_model(name, about["leaves"], params)  # first, so that the trainer hears of no other model
        state = trainer.abstract_state(params)
        check_fits(name, about["leaves"], places_of(trainer, state))
        impls = {name: row["impl"] for name, row in about["leaves"].items() if "impl" in row}
        return to_ranks(trainer, state, self._read(about), impls), about["data_position"]

    def about(self, step: int | None = None) -> dict[str, Any]:
        """Tells what a checkpoint is without reading its arrays.

        Args:
            step: Of which checkpoint; the newest if None.

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
        if about.pop("crc32", None) != checksum(about):
            raise self._damaged(step)
        if about["step"] != step:
            raise ValueError(
                f"checkpoint of step {step} {self._where} is that of step {about['step']}: remove or rename its folder"
            )
        return about

    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints, oldest first, with that which is being written."""
        if not self._manager.is_saving_in_progress():
            self._manager.reload()  # others may have removed some, as we say of damaged ones, or saved some
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Gives the step of the newest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Waits until all that was saved is written.

        Raises:
            Exception: What kept it from being written.
        """
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends what writes; the object is of no use then."""
        self._manager.close()

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
        # Orbax passes over bytes that changed in the middle of an array, and takes missing ones for zeros.
        if any(checksum(arrays[name]) != leaves[name]["crc32"] for name in stored):
            raise self._damaged(step)
        return arrays


class _HostArrays(ocp.type_handlers.NumpyHandler):
    """Writes arrays that nobody else has, so without a copy of its own, and reads one after the other."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> list[np.ndarray]:
        # Together, those still being read when one fails print tracebacks.
        args = args or [None] * len(infos)
        arrays = []
        for info, arg in zip(infos, args, strict=True):
            arrays += await super().deserialize([info], arg and [arg])
        return arrays
