"""``python -m jaxddp train``: trains a byte-level language model on real text."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from ..processes.job import Job, find_job
from ..processes.watchdog import name_log
from .interrupts import Signalled, ended_by_interrupts
from .launch import add_max_restarts, check_elastic, launch
from .quiet import import_jax
from .train_options import DEFAULT_SIMULATED_DEVICES, TrainOptions
from .train_report import TrainSummary


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
    add_options(parser)
    _add(parser, "--devices", int, "number of ranks", f"every accelerator, or {DEFAULT_SIMULATED_DEVICES} simulated "
         "devices")  # fmt: skip
    parser.add_argument(
        "--processes", type=int, metavar="N", help="start N processes on this machine, which share the devices"
    )
    add_max_restarts(parser)
    _add(parser, "--compute-dtype", str, "compute and gather parameters in this dtype, and update float32 masters: "
         "bfloat16; float16 with a dynamic loss scale and --nonfinite skip", "float32 alone", "NAME")  # fmt: skip
    parser.add_argument("--simulate", action="store_true", help="simulate devices on the CPU even with accelerators")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``torchref`` has as well."""
    _add(parser, "--stuck-s", float, "in a job of several processes: seconds without an answer of one, or in which the "
         "others wait for it in a step, before all end with status 5", metavar="S")  # fmt: skip
    _add(parser, "--strategy", str, "one of STRATEGIES", metavar="NAME")
    _add(parser, "--bucket-mb", float, "bucket cap in MiB (2^20 bytes)", "25 after a first bucket of 1; of "
         "bucketed, then up to an eighth of the gradients if that is more", "MIB")  # fmt: skip
    _add(parser, "--compression", str, "gradient compression: none; bf16 or fp16, except under zero3; powersgd:RANK "
        "under naive, flat, overlapped and bucketed only (rank 4: loss 13 %% behind after 200 steps of adamw, 0.6 %% "
        "of sgd)", metavar="NAME")  # fmt: skip
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="folder for the log of each process of a job (default: runs/job-PORT, by the coordinator's port)",
    )
    models = "byte, byte_shallow, lm_9m, small, medium, large, xl, seed_xl or 2.7b"
    _add(parser, "--model", str, models, metavar="NAME")
    _add(parser, "--weights", str, "initial parameters, as export_weights writes them under PyTorch's names",
         "drawn from --seed", "FILE")  # fmt: skip
    _add(parser, "--data", str, "file, or folder of text files", "the Python standard library", "PATH")
    _add(parser, "--steps", int, "training steps")
    _add(parser, "--batch-size", int, "examples per step, of all ranks together")
    _add(parser, "--microbatches", int, "parts into which each rank splits its examples, to save memory")
    _add(parser, "--optimizer", str, "adamw (weight decay 0.01), adam or sgd", metavar="NAME")
    _add(parser, "--learning-rate", float, "constant learning rate", metavar="RATE")
    _add(parser, "--max-grad-norm", float, "clip the global norm of the gradient to this", "no clipping", "NORM")
    _add(parser, "--seed", int, "seed of the initial parameters and of the order of the text")
    _add(parser, "--eval-every", int, "steps between validations; 0: at the end only")
    _add(parser, "--eval-batches", int, "held-out batches of each validation")
    _add(parser, "--checkpoint", str, "folder for checkpoints; the last step is always saved", "none is saved", "DIR")
    _add(parser, "--checkpoint-every", int, "steps between checkpoints; 0: at the end only")
    _add(parser, "--keep", int, "checkpoints to keep, the newest; of 1, none is left if training cannot go on from it")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, with any number of "
        "ranks and any strategy; from step 0 if --checkpoint holds none; ends with status 0 if all --steps are taken: "
        "one command starts and restarts a run")  # fmt: skip
    parser.add_argument("--allow-changes", action="store_true", help="with --resume: go on although learning rate, "
        "clipping, optimizer, batch size, compression or compute dtype differ from the checkpoint's")  # fmt: skip
    _add(parser, "--failed-save", str, "if a checkpoint cannot be written, as on a full disk: stop ends the run with "
         "status 2; continue says so and tries the next; the last has to be written", metavar="POLICY")  # fmt: skip
    _add(parser, "--nonfinite", str, "if loss or gradient become NaN or infinite: raise ends the run with status 3; "
        "stop does so too, and keeps the state before as STEP.nonfinite; skip goes on without the update",
         metavar="POLICY")  # fmt: skip
    _add(parser, "--max-skips", int, "steps in a row that --nonfinite skip may skip")
    _add(parser, "--check-replicas-every", int, "steps between checks that ranks hold the same, bit for bit; before "
         "each checkpoint too")  # fmt: skip
    _add(parser, "--replicas", str, "if they do not: stop ends the run with status 4; restore goes on from the newest "
         "checkpoint", metavar="POLICY")  # fmt: skip


def run(arguments: argparse.Namespace) -> int | None:
    """Trains as the options ask for, and shows it; raises as ``show``."""
    options = TrainOptions(**{field.name: getattr(arguments, field.name) for field in fields(TrainOptions)})

    if arguments.max_restarts and arguments.processes is None:
        raise ValueError(f"max_restarts (={arguments.max_restarts}) must come with processes")
    check_restarts(arguments, options)
    if arguments.processes is not None and find_job() is None:  # the processes get the same command

        def fits(num_processes: int) -> bool:
            num_ranks = options.devices or num_processes
            return num_ranks % num_processes == 0 and options.batch_size % (num_ranks * options.microbatches) == 0

        command = ["-m", "jaxddp", *sys.argv[1:]]
        return launch(command, arguments.processes, None, arguments.max_restarts, fits if arguments.elastic else None)
    with ended_by_interrupts():
        import_jax()  # late, so that the help needs no JAX
        from .train_loop import train

    if options.checkpoint is not None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs errors that it also raises
    show(train, options, arguments.log_dir)
    return None


def check_restarts(arguments: argparse.Namespace, options: TrainOptions) -> None:
    """Refuses restarts that would find a checkpoint and start at step 0.

    Raises:
        ValueError: If they come without ``resume``, or ``elastic`` without them.
    """
    if arguments.max_restarts and options.checkpoint is not None and not options.resume:
        raise ValueError(f"max_restarts (={arguments.max_restarts}) must come with resume where there is a checkpoint")
    check_elastic(arguments)


def show(train: Callable[..., TrainSummary | None], options: TrainOptions, log_dir: str | None) -> None:
    """Trains, and shows it if this is process 0 of its job; in a job of several, every process writes a log.

    Raises:
        KeyboardInterrupt: After an interrupt, with the number of steps taken.
        Signalled: After another signal, likewise.
    """
    from .train_console import TrainConsole

    job = find_job()
    with _open_log(log_dir, job) if job and job.num_processes > 1 else contextlib.nullcontext() as log:
        is_shown = job is None or job.process_id == 0
        console = TrainConsole(options.steps, None if is_shown else log, log if is_shown else None)
        try:
            with console:
                summary = train(options, console.say, console.on_step)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"after {console.num_steps_taken} of {options.steps} steps") from None
        except Signalled as signalled:
            raise Signalled(signalled.number, f"after {console.num_steps_taken} of {options.steps} steps") from None
        if summary is not None:  # there were steps left to take
            console.show(summary)


def _add(
    parser: argparse.ArgumentParser,
    flag: str,
    kind: type,
    text: str,
    default_text: str = "%(default)s",
    metavar: str = "N",
) -> None:
    default = getattr(TrainOptions, flag.removeprefix("--").replace("-", "_"))
    parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default_text})")


def _open_log(folder: str | None, job: Job) -> TextIO:
    path = Path(folder or f"runs/job-{job.port}", f"rank-{job.process_id}.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    name_log(str(path.absolute()))
    return path.open("a", buffering=1)
