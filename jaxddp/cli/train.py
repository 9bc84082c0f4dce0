"""``python -m jaxddp train``: trains a byte-level language model on real text."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from ..job import Job, find_job
from .launch import launch
from .quiet import import_jax
from .train_options import DEFAULT_SIMULATED_DEVICES, TrainOptions


def add_parser(commands: Any) -> None:
    """Adds the command ``train`` to argparse's subparsers."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model, and show what was communicated",
        description="Train a byte-level language model with data parallelism. Without --data the text is the Python "
        "standard library's own source. Without accelerators the CPU poses as several devices. Under torchrun, srun or "
        "mpirun the processes of the job train together.",
        allow_abbrev=False,
    )

    def add(flag: str, kind: type, text: str, default_text: str = "%(default)s", metavar: str = "N") -> None:
        default = getattr(TrainOptions, flag.removeprefix("--").replace("-", "_"))
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default_text})")

    add("--strategy", str, "one of STRATEGIES", metavar="NAME")
    add("--bucket-mb", float, "bucket cap in MiB (2^20 bytes)", "25 after a first bucket of 1", "MIB")
    add("--compression", str, "gradient compression: none; bf16 or fp16, except under zero3; powersgd:RANK under "
        "naive, flat, overlapped and bucketed only (rank 4: loss 13 %% behind after 200 steps of adamw, 0.6 %% of sgd)",
        metavar="NAME")  # fmt: skip
    add("--devices", int, "number of ranks", f"every accelerator, or {DEFAULT_SIMULATED_DEVICES} simulated devices")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="start N processes on this machine, which share the devices"
    )
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="folder for the log of each process of a job (default: runs/job-PORT, by the coordinator's port)",
    )
    parser.add_argument("--simulate", action="store_true", help="simulate devices on the CPU even with accelerators")
    add("--model", str, "byte, byte_shallow, lm_9m, small, medium, large, xl, seed_xl or 2.7b", metavar="NAME")
    add("--data", str, "file, or folder of text files", "the Python standard library", "PATH")
    add("--steps", int, "training steps")
    add("--batch-size", int, "examples per step, of all ranks together")
    add("--microbatches", int, "parts into which each rank splits its examples, to save memory")
    add("--optimizer", str, "adamw (weight decay 0.01), adam or sgd", metavar="NAME")
    add("--learning-rate", float, "constant learning rate", metavar="RATE")
    add("--max-grad-norm", float, "clip the global norm of the gradient to this", "no clipping", "NORM")
    add("--seed", int, "seed of the initial parameters and of the order of the text")
    add("--eval-every", int, "steps between validations; 0: at the end only")
    add("--eval-batches", int, "held-out batches of each validation")
    add("--checkpoint", str, "folder for checkpoints; the last step is always saved", "none is saved", "DIR")
    add("--checkpoint-every", int, "steps between checkpoints; 0: at the end only")
    add("--keep", int, "checkpoints to keep, the newest")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, with any number of "
        "ranks and any strategy; from step 0 if --checkpoint holds none; ends with status 0 if all --steps are taken: "
        "one command starts and restarts a run")  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int | None:
    """Trains as the options ask for, and shows it; in a job of several processes, process 0 shows it.

    Raises:
        KeyboardInterrupt: After an interrupt, with the number of steps taken.
    """
    options = TrainOptions(**{field.name: getattr(arguments, field.name) for field in fields(TrainOptions)})

    if arguments.processes is not None and find_job() is None:  # the processes get the same command
        return launch(["-m", "jaxddp", *sys.argv[1:]], arguments.processes)
    import_jax()  # late, so that the help needs no JAX
    from .train_console import TrainConsole
    from .train_loop import train

    if options.checkpoint is not None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs errors that it also raises
    job = find_job()
    log = None if job is None or job.num_processes == 1 else _open_log(arguments.log_dir, job)
    is_shown = job is None or job.process_id == 0
    console = TrainConsole(options.steps, None if is_shown else log, log if is_shown else None)
    try:
        with console:
            summary = train(options, console.say, console.on_step)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"after {console.num_steps_taken} of {options.steps} steps") from None
    if summary is not None:  # there were steps left to take
        console.show(summary)
    return None


def _open_log(folder: str | None, job: Job) -> TextIO:
    path = Path(folder or f"runs/job-{job.port}", f"rank-{job.process_id}.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", buffering=1)
