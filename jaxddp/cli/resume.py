"""Where a run of ``train`` goes on: its position in the data, and the options that must be those of the checkpoint.

Both packages use it; no framework.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..training.data import Corpus
from .train_options import TrainOptions

CHANGEABLE = ("learning_rate", "max_grad_norm", "optimizer", "batch_size", "compression", "compute_dtype")
"""Options that change what a resumed run computes, which ``allow_changes`` allows."""


def position_of(options: TrainOptions, corpus: Corpus, num_batches: int) -> dict[str, Any]:
    """The position in the data, the number of examples taken from this order of this text, and how they were used."""
    text = {"seed": options.seed, "text_bytes": corpus.num_bytes, "text_crc32": corpus.crc32}
    settings = {name: getattr(options, name) for name in CHANGEABLE}
    return {"examples": num_batches * options.batch_size, **text, **settings}


def check_resumes(options: TrainOptions, taken: int) -> None:
    """Refuses to start at step 0 in a folder that holds a checkpoint.

    Raises:
        ValueError: If the options do not resume.
    """
    if not options.resume:
        raise ValueError(f"checkpoint (={options.checkpoint!r}) holds step {taken}: resume, or choose another folder")


def check_position(
    saved: Any, here: dict[str, Any], options: TrainOptions, taken: int, say: Callable[[str], None]
) -> None:
    """Compares the position that a checkpoint holds with that of these options and this text; says what changes.

    Args:
        saved: The checkpoint's, of any version of this program.
        here: ``position_of`` these options.
        options: Whether changes are allowed.
        taken: The checkpoint's step.
        say: Gets a line for each change.

    Raises:
        ValueError: If it is another program's, of another text or seed, or of other options that are not to change.
    """
    if not isinstance(saved, dict) or not {"examples", "seed", "text_bytes"} <= saved.keys() <= here.keys():
        raise ValueError(f"data_position (={saved!r}) of the checkpoint of step {taken} must be one of this program")
    for name in ("seed", "text_bytes", "text_crc32"):
        if here[name] != saved.get(name, here[name]):
            raise ValueError(
                f"{name} (={here[name]}) must be {saved[name]}, as in the checkpoint, to go on in the data"
            )
    for name in CHANGEABLE:
        if here[name] == saved.get(name, here[name]):
            continue
        if not options.allow_changes:
            raise ValueError(
                f"{name} (={here[name]}) must be {saved[name]}, as in the checkpoint of step {taken}: "
                "set allow_changes to go on with it"
            )
        say(f"changed at step {taken}: {name} from {saved[name]} to {here[name]}")


def num_batches_of(saved: dict[str, Any], options: TrainOptions) -> int:
    """The batches of these options before a saved position.

    Raises:
        ValueError: If it is within one.
    """
    if saved["examples"] % options.batch_size:
        raise ValueError(f"batch_size (={options.batch_size}) must divide the examples taken (={saved['examples']})")
    return saved["examples"] // options.batch_size


class CanSetAside(Protocol):
    """The checkpoints of either package."""

    def set_aside(self, step: int) -> str | None:
        """Renames the newest checkpoint, if it is of this step and an older one is left; returns the new name."""


@contextlib.contextmanager
def set_aside_after_error(checkpoints: CanSetAside | None, step: int, say: Callable[[str], None]) -> Iterator[None]:
    """After numbers that are not finite, sets the checkpoint aside that holds the state they came from."""
    try:
        yield
    except FloatingPointError:
        if checkpoints is not None:
            set_aside(checkpoints, step, say)
        raise


def set_aside(checkpoints: CanSetAside, step: int, say: Callable[[str], None]) -> None:
    """Renames the checkpoint of a state after which nothing was finite, so that a resumed run takes the one before."""
    if name := checkpoints.set_aside(step):
        say(f"no step from the checkpoint of step {step} is finite: renamed it to {name}")


@contextlib.contextmanager
def saying(say: Callable[[str], None]) -> Iterator[None]:
    """Says why a checkpoint was not written, in place of raising."""
    try:
        yield
    except OSError as error:
        say(f"{error}; going on")
