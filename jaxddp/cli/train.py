"""``python -m jaxddp train``: the trainer as a program, a byte-level language model on real text.

The options and what becomes of them; the run itself is in ``train_loop.py``, what a user sees in ``train_console.py``.
"""

from __future__ import annotations

import argparse
import logging
import math
from dataclasses import dataclass, fields
from typing import Any

from .quiet import import_jax

DEFAULT_SIMULATED_DEVICES = 4
OPTIMIZERS = ("adamw", "adam", "sgd")


@dataclass(frozen=True)
class TrainOptions:
    """What to train and how; the command line's options, under the same names and with the same defaults.

    Raises:
        ValueError: If a number is out of range, or the optimizer is unknown.
    """

    strategy: str = "bucketed"
    devices: int | None = None
    simulate: bool = False
    steps: int = 200
    data: str | None = None
    model: str = "byte"
    bucket_mb: float | None = None
    compression: str = "none"
    batch_size: int = 32
    microbatches: int = 1
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    max_grad_norm: float | None = None
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 4
    checkpoint: str | None = None
    checkpoint_every: int = 50
    keep: int = 3
    resume: bool = False

    def __post_init__(self) -> None:
        """Checks what can be checked before anything is loaded."""
        for name in ("devices", "steps", "batch_size", "microbatches", "eval_batches", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} (={value}) must be a positive integer")
        if self.eval_every < 0:
            raise ValueError(f"eval_every (={self.eval_every}) must not be negative; 0 evaluates at the end only")
        if self.checkpoint_every < 0:
            raise ValueError(
                f"checkpoint_every (={self.checkpoint_every}) must not be negative; 0 saves at the end only"
            )
        if self.resume and self.checkpoint is None:
            raise ValueError(f"resume (={self.resume}) must come with checkpoint, the folder to go on from")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed (={self.seed}) must be at least 0 and below 2^31")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate (={self.learning_rate}) must be a positive finite number")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm (={self.max_grad_norm}) must be positive")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}: one of {', '.join(OPTIMIZERS)}")
        if self.devices is not None:
            self.check_batch_size(self.devices)

    def check_batch_size(self, num_ranks: int) -> None:
        """Refuses a batch that cannot be split evenly.

        Args:
            num_ranks: Number of ranks of the run.

        Raises:
            ValueError: If ``batch_size`` is not divisible by ``num_ranks x microbatches``.
        """
        if self.batch_size % (num_ranks * self.microbatches):
            raise ValueError(
                f"batch_size (={self.batch_size}) must be divisible by devices x microbatches "
                f"(={num_ranks} x {self.microbatches})"
            )


def add_parser(commands: Any) -> None:
    """Adds the command ``train``.

    Args:
        commands: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model, and show what was communicated",
        description="Train a byte-level language model with data parallelism. Without --data the text is the Python "
        "standard library's own source. Without accelerators the CPU poses as several devices.",
        allow_abbrev=False,
    )

    def add(flag: str, kind: type, text: str, default_text: str = "%(default)s", metavar: str = "N") -> None:
        default = getattr(TrainOptions, flag.removeprefix("--").replace("-", "_"))
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default_text})")

    add("--strategy", str, "one of STRATEGIES", metavar="NAME")
    add("--bucket-mb", float, "bucket cap in MiB (2^20 bytes)", "25 after a first bucket of 1", "MIB")
    add(
        "--compression",
        str,
        "what travels of gradients: none; bf16 or fp16, except under zero3; powersgd:RANK under naive, flat, "
        "overlapped and bucketed only (at rank 4 it was 13 %% behind after 200 steps of adamw, 0.6 %% of sgd)",
        metavar="NAME",
    )
    add("--devices", int, "number of ranks", f"every accelerator, or {DEFAULT_SIMULATED_DEVICES} simulated devices")
    parser.add_argument("--simulate", action="store_true", help="use simulated CPU devices even beside accelerators")
    add("--model", str, "byte, byte_shallow, lm_9m, small, medium, large, xl, seed_xl or 2.7b", metavar="NAME")
    add("--data", str, "file, or folder of text files", "the Python standard library", "PATH")
    add("--steps", int, "training steps")
    add("--batch-size", int, "examples per step, of all ranks together")
    add("--microbatches", int, "parts into which each rank splits its examples, to save memory")
    add("--optimizer", str, "adamw (weight decay 0.01), adam or sgd", metavar="NAME")
    add("--learning-rate", float, "constant learning rate", metavar="RATE")
    add("--max-grad-norm", float, "clip the global norm of the gradient to this", "no clipping", "NORM")
    add("--seed", int, "of the initial parameters and the order of the text")
    add("--eval-every", int, "steps between validations; 0: at the end only")
    add("--eval-batches", int, "held-out batches of each validation")
    add("--checkpoint", str, "folder for checkpoints; the last step is always saved", "none is saved", "DIR")
    add("--checkpoint-every", int, "steps between checkpoints; 0: at the end only")
    add("--keep", int, "checkpoints to keep, the newest")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint, on any number of ranks and with any strategy; from step 0 if "
        "--checkpoint holds none yet, and no further if it has taken all --steps, so that one command starts, restarts "
        "and ends with status 0",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Trains as the command line says, and shows it.

    Raises:
        KeyboardInterrupt: As it came, with words on how far training got.
    """
    options = TrainOptions(**{field.name: getattr(arguments, field.name) for field in fields(TrainOptions)})

    import_jax()  # only now: the help must not wait for it
    from .train_console import TrainConsole
    from .train_loop import train

    if options.checkpoint is not None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's; what fails is raised as well
    console = TrainConsole(options.steps)
    try:
        with console:
            summary = train(options, console.say, console.on_step)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"after {console.num_steps_taken} of {options.steps} steps") from None
    if summary is not None:  # there were steps left to take
        console.show(summary)
