"""``python -m torchref train``: trains a byte-level language model on real text, as ``python -m jaxddp train`` does."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch.distributed as dist

from jaxddp.cli.launch import launch
from jaxddp.cli.train import DEFAULT_SIMULATED_DEVICES, add_flags, options_of, say_on_first
from jaxddp.processes.job import find_job, visible_gpus

from .train_program import train


def add_parser(commands: Any) -> None:
    """Adds the command ``train`` to argparse's subparsers."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model, and show what was communicated",
        description="Train a byte-level language model with data parallelism. Without --data the text is the Python "
        "standard library's own source. A rank is a process: those of the job under torchrun, srun or mpirun, else as "
        "many as --devices or --processes asks for, on this machine's GPUs or over Gloo on its CPU.",
        allow_abbrev=False,
    )
    add_flags(parser, without=["compute_dtype"])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int | None:
    """Trains; outside a job it starts the processes of one, and gives the launcher's exit status."""
    options = options_of(arguments)
    if None not in (options.devices, options.processes) and options.devices != options.processes:
        raise ValueError(f"devices (={options.devices}) must be processes (={options.processes}): a rank is a process")
    if find_job() is None:
        num_ranks = options.devices or options.processes or len(visible_gpus()) or DEFAULT_SIMULATED_DEVICES
        return launch(["-m", "torchref", *sys.argv[1:]], num_ranks, max_restarts=options.max_restarts)
    train(options, say_on_first())
    dist.destroy_process_group()
    return None
