"""``python -m torchref train``: trains a byte-level language model on real text, as ``python -m jaxddp train`` does."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from jaxddp.cli.interrupts import ended_by_interrupts
from jaxddp.cli.launch import add_max_restarts, launch
from jaxddp.cli.train import add_options, check_restarts, show
from jaxddp.cli.train_options import DEFAULT_SIMULATED_DEVICES, TrainOptions
from jaxddp.processes.job import find_job, visible_gpus


def add_parser(commands: Any) -> None:
    """Adds the command ``train`` to argparse's subparsers."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model, and show what was communicated",
        description="Train a byte-level language model with data parallelism. Without --data the text is the Python "
        "standard library's own source. A rank is a process: those of the job under torchrun, srun or mpirun, else as "
        "many as --ranks asks for, on this machine's GPUs or over Gloo on its CPU.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("--ranks", "--devices", "--processes", type=int, dest="devices", metavar="N", help="number of "
        f"ranks (default: those of the job, every GPU, or {DEFAULT_SIMULATED_DEVICES} processes)")  # fmt: skip
    add_max_restarts(parser)
    parser.add_argument("--simulate", action="store_true", help="train on the CPU even with GPUs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int | None:
    """Trains as the options ask for, and shows it; outside a job it starts the processes of one."""
    here = {field.name for field in fields(TrainOptions)} & vars(arguments).keys()
    options = TrainOptions(**{name: getattr(arguments, name) for name in here})
    check_restarts(arguments, options)

    with ended_by_interrupts():
        from .train_loop import check, train  # late, so that the help needs no torch

    if find_job() is None:
        num_gpus = 0 if options.simulate else len(visible_gpus())
        num_ranks = options.devices or num_gpus or DEFAULT_SIMULATED_DEVICES
        options.check_batch_size(num_ranks)
        check(options)

        def fits(num_processes: int) -> bool:
            return options.batch_size % (num_processes * options.microbatches) == 0

        command = ["-m", "torchref", *sys.argv[1:]]  # the processes get the same
        return launch(command, num_ranks, None, arguments.max_restarts, fits if arguments.elastic else None)
    with ended_by_interrupts():
        show(train, options, arguments.log_dir)
    return None
