"""``python -m jaxddp train``: trains a byte-level language model on real text."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from ..processes.job import find_job
from .interrupts import ended_by_interrupts
from .launch import launch
from .quiet import import_jax
from .train_options import add_flags, options_of, say_on_first


def add_parser(commands: Any) -> None:
    """Adds the command ``train`` to argparse's subparsers."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model, and show what was communicated",
        description="Train a byte-level language model with data parallelism. Without --data the text is the Python "
        "standard library's own source. Without accelerators, and with JAX_PLATFORMS=cpu, the CPU poses as several "
        "devices. Under torchrun, srun or mpirun the processes of the job train together.",
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int | None:
    """Trains, or starts the processes of a job that do; the launcher's exit status."""
    options = options_of(arguments)
    if options.processes is not None and find_job() is None:  # the processes get the same command
        return launch(["-m", "jaxddp", *sys.argv[1:]], options.processes, max_restarts=options.max_restarts)
    if options.max_restarts and options.processes is None:
        raise ValueError(f"max_restarts (={options.max_restarts}) must come with processes")
    with ended_by_interrupts():
        import_jax()  # late, so that the help needs no JAX
        from . import train_program

    if options.checkpoint is not None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs errors that it also raises
    train_program.train(options, say_on_first())
    return None
