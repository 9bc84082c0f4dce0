"""A rank of jaxddp: the command ``python -m jaxddp train`` itself, which reports its steps."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import numpy as np

from jaxddp.__main__ import main as jaxddp
from jaxddp.cli.quiet import import_jax
from jaxddp.cli.train_options import StepReport, TrainOptions
from jaxddp.sizes import SIZES

from .program import BATCH_SIZE, MODEL, STUCK_S, Events, parse

_COMPILED = re.compile(r"compiled in ([\d.]+) s")


def main() -> int:
    """Trains; the exit status is that of the command."""
    program = parse()
    events = Events(program)
    import_jax()
    from jaxddp.cli import train_program

    train = train_program.train
    SIZES["soak"] = MODEL

    def reported(options: TrainOptions, say: Callable[[str], None]) -> list[StepReport]:
        def say_too(text: str) -> None:
            say(text)
            if found := _COMPILED.fullmatch(text):
                events.write("compiled", seconds=float(found[1]))

        return train(options, say_too, lambda report: events.step(report.step, report.save_s))

    setattr(train_program, "train", reported)  # noqa: B010
    options = {
        "model": "soak", "steps": program.steps, "batch-size": BATCH_SIZE, "seed": program.seed,
        "stuck-s": STUCK_S, "checkpoint": program.checkpoint, "checkpoint-every": program.checkpoint_every,
    }  # fmt: skip
    return jaxddp(["train", "--resume", *(f"--{name}={value}" for name, value in options.items())])


def weights(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the parameters of the newest checkpoint."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jaxddp.checkpoint import Checkpoints
    from jaxddp.checkpoint.interop import to_numpy
    from jaxddp.models import build

    with Checkpoints(folder) as checkpoints:
        step = checkpoints.about()["step"]
        return step, to_numpy(checkpoints.restore_params(build(MODEL)[1]))


if __name__ == "__main__":
    sys.exit(main())
