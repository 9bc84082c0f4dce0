"""Saves training states, and restores them on any number of ranks and under any strategy.

``DIR/120/state.npz`` holds every leaf in full, without padding, under its name in the state, such as
``opt_state.0.mu.head.kernel``; ``about.json`` (``folder.py``) has their shapes and dtypes. Moments stay as wide as they
were saved. The host must have memory for the state; with several processes, each device for each leaf.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..training.agreement import check_alike, gather_texts
from ..training.placement import from_first_process
from ..training.train import Trainer, TrainState
from ..training.validation import check_state, with_arrays
from ..tree import is_floating, is_key, like, named_leaves
from .folder import CheckpointFolder, check_finite
from .host_state import places_of, to_host, to_ranks

_FILE = "state.npz"
_ANSWER_S = 1200  # for process 0 to write


class Checkpoints(CheckpointFolder):
    """The checkpoints in one folder; a context manager that lets other jobs save there at its end.

    All processes of a job call its methods but ``steps``, ``about`` and ``close``, and all raise the same.
    """

    package = "jaxddp"
    format = 3

    def save(self, trainer: Trainer, state: TrainState, *, data_position: Any = None) -> None:
        """Saves a state of the trainer under its step; returns once it is written.

        ``data_position`` is where to continue in the data, as a JSON value; the same in all processes.

        Raises a ValueError if the state was donated, another job saves into the folder, it has this or a later step, or
        processes differ in step or position; a FloatingPointError if parameters or moments are not finite, or the model
        state has NaN; an OSError if it cannot be written, or the position is not JSON. Older checkpoints stay.
        """
        check_state(state)
        state, step = with_arrays(state), int(state.step)
        check_alike({"step": step, "data_position": data_position})
        self._together(lambda: self._begin(step))
        arrays: dict[str, Any] = {}
        dtypes = {}  # not the layout's, which may be another after an update, and of a number that a user has set
        for name, array in to_host(trainer, state):
            check_finite(step, name, array)
            dtypes[name] = array.dtype
            if jax.process_index() == 0:  # the others help to gather
                arrays[name] = array
        leaves = {
            name: {"shape": leaf.shape, "dtype": str(leaf.dtype if is_key(leaf) else dtypes[name])}
            for name, leaf in named_leaves(places_of(trainer, state)).items()
        }
        place = {"step": step, "strategy": trainer.strategy.name, "num_ranks": trainer.num_ranks}
        about = place | {"data_position": data_position, "leaves": leaves}
        self._together(lambda: self._write(about, lambda folder: np.savez(folder / _FILE, **arrays)))

    def restore(
        self, trainer: Trainer, params: Any, *, model_state: Any = None, step: int | None = None
    ) -> tuple[TrainState, Any]:
        """Restores a state for a trainer's ranks and strategy, and gives the data position saved with it.

        Args:
            trainer: May have other ranks and another strategy than the trainer that saved.
            params: The model's parameters, arrays or ``jax.ShapeDtypeStruct``; dtypes may be wider than those saved.
            model_state: The same of the model state, with ``has_state``.
            step: Of the checkpoint; the newest that is not damaged for process 0 if None.

        Raises a ValueError if there is no such checkpoint; it is of another model, optimizer or version, of wider
        dtypes, or damaged; or the mesh is a target's; an OSError if it cannot be read.
        """
        trainer._check_devices("restore", "abstract_state")
        about = self._together(lambda: self._choose(step))
        self._check_fits(about, {"params": params})  # first, so that the trainer never sees another model
        state = trainer.abstract_state(params, model_state)
        places = places_of(trainer, state)
        wanted = places._asdict()
        if not jax.tree.leaves(places.model_state):  # one that is not asked for stays in the checkpoint
            del wanted["model_state"]
        return to_ranks(trainer, state, self._read(about, wanted)), about["data_position"]

    def restore_params(self, params: Any, *, model_state: Any = None, step: int | None = None) -> Any:
        """Restores parameters alone, for another optimizer, a model with other parts, or to evaluate; as ``restore``.

        Gives a tree like ``params`` of NumPy arrays; with a ``model_state`` that and one like it.
        """
        about = self._together(lambda: self._choose(step))
        tree = {"params": params} | ({} if model_state is None else {"model_state": model_state})
        arrays = self._read(about, tree, is_whole=False)

        def restored_leaf(leaf: Any, array: Any) -> Any:
            return jax.random.wrap_key_data(array, impl=leaf.dtype) if is_key(leaf) else array.astype(leaf.dtype)

        restored = jax.tree.map(restored_leaf, tree, like(tree, arrays))
        return restored["params"] if model_state is None else (restored["params"], restored["model_state"])

    def _read(self, about: dict[str, Any], wanted: dict[str, Any], is_whole: bool = True) -> dict[str, np.ndarray]:
        """Reads the leaves that are wanted, by name, in process 0, which sends them to the others."""
        self._check_fits(about, wanted, is_whole)
        arrays: dict[str, np.ndarray] = {}

        def read() -> dict[str, Any]:
            with np.load(self._path(about["step"]) / _FILE) as archive:
                arrays.update({name: archive[name] for name in named_leaves(wanted)})
            return {name: (array.shape, array.dtype.str) for name, array in arrays.items()}

        forms = self._together(read)
        if jax.process_count() > 1:
            arrays = from_first_process(arrays or {name: np.empty(*form) for name, form in forms.items()})
        for name, array in arrays.items():
            dtype = about["leaves"][name]["dtype"]
            if not dtype.startswith("key<"):  # as its words
                arrays[name] = array.view(jnp.dtype(dtype))  # NumPy's files hold bfloat16 as bytes
        return arrays

    def _check_fits(self, about: dict[str, Any], wanted: dict[str, Any], is_whole: bool = True) -> None:
        """Refuses the first leaf of another name, shape or narrower dtype; ``is_whole``: there may be no others."""
        checkpoint, ours, saved = self._name(about["step"]), named_leaves(wanted), about["leaves"]
        theirs = [name for name in saved if is_whole and name.partition(".")[0] in wanted]
        for name in dict.fromkeys([*ours, *theirs]):
            there = (saved[name]["dtype"], tuple(saved[name]["shape"])) if name in saved else ("missing",)
            here = (str(ours[name].dtype), tuple(ours[name].shape)) if name in ours else ("missing",)
            if there[1:] != here[1:]:
                owner = "optimizer" if name.startswith("opt_state") else "model"
                said = f"{' '.join(map(str, there))} there and {' '.join(map(str, here))} here"
                raise ValueError(f"{checkpoint} is of another {owner}: {name} is {said}")
            old, new = there[0], here[0]
            if old != new and _loses_bits(name, old, new, is_number=not ours[name].shape):
                raise ValueError(f"{checkpoint} has {name} in {old}, of which {new} here would lose bits")

    @property
    def _place(self) -> tuple[int, int]:
        return jax.process_index(), jax.process_count()

    def _from_first(self, text: str) -> str:
        return next(gather_texts(text, _ANSWER_S))


def _loses_bits(name: str, old: str, new: str, is_number: bool) -> bool:
    """Whether a leaf that was saved in a dtype cannot be restored where another one is asked for."""
    if "key<" in old + new:
        return True
    if name.startswith("opt_state") and is_floating(new):
        if is_floating(old):  # stays as wide, if JAX has that width
            return jax.dtypes.canonicalize_dtype(old) != old
        if is_number:  # a learning rate that was set to 1
            return False
    return not np.can_cast(jnp.dtype(old), jnp.dtype(new))
