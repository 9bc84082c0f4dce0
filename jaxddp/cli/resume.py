"""Where a run of ``train`` goes on: its position in the data, and the options that must be those of the checkpoint.

Both packages use it; no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..training.data import Corpus
from .train_options import TrainOptions

CHANGEABLE = ("learning_rate", "max_grad_norm", "optimizer", "batch_size", "compression", "compute_dtype")
"""Options that change what a resumed run computes, which ``allow_changes`` allows."""


def position_of(options: TrainOptions, corpus: Corpus, num_batches: int) -> dict[str, Any]:
    """The position in the data, the number of examples taken from this order of this text, and how they were used."""
    text = {"seed": options.seed, "text_bytes": corpus.num_bytes, "text_crc32": corpus.crc32}
    settings = {name: getattr(options, name) for name in CHANGEABLE}
    return {"examples": num_batches * options.batch_size, **text, **settings}


def check_position(
    saved: Any, here: dict[str, Any], options: TrainOptions, taken: int, say: Callable[[str], None]
) -> None:
    """Compares the position that a checkpoint holds with that of these options and this text; says what changes.

    ``saved`` is that of the checkpoint of step ``taken``, by any version of this program.

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
