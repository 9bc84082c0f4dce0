"""The program of ``python -m torchref train``: a language model of bytes, trained data-parallel.

The twin of ``jaxddp/cli/train_program.py``. A rank is a process.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from jaxddp.checkpoint.weights import load_weights
from jaxddp.cli.interrupts import Signalled, noted_signals
from jaxddp.cli.train import (
    CHECK_REPLICAS_EVERY,
    MAX_SKIPS,
    NUM_VALIDATION_BATCHES,
    Progress,
    StepReport,
    TrainOptions,
    batches_taken,
    check_validation,
    position_of,
    skipped_too_often,
)
from jaxddp.processes.job import find_job
from jaxddp.processes.watchdog import begin_step, end_step
from jaxddp.training.clock import stopwatch
from jaxddp.training.data import Batch, Corpus

from ..agreement import check_alike, group_device
from ..checkpoint import Checkpoints
from ..communication.collectives import Issued, record
from ..interop import from_numpy
from ..launch import init_from_env
from ..models import build, loss_fn
from ..registry import STRATEGIES, make_training
from ..replicas import check_replicas
from ..strategy import DataParallel
from ..train import Trainer, local_rows


def train(
    options: TrainOptions,
    say: Callable[[str], None] = lambda line: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> list[StepReport]:
    """Trains a language model; arguments, what it returns and raises are those of ``jaxddp``'s."""
    corpus = Corpus(options.data, context=options.config.context)
    job = find_job()
    num_ranks = 1 if job is None else job.num_processes
    if options.devices not in (None, num_ranks):
        raise ValueError(f"devices (={options.devices}) must be the job's processes (={num_ranks}), a rank each")
    device = init_from_env(stuck_s=options.stuck_s)
    options.check_batch_size(dist.get_world_size())
    check_alike(options.fingerprint | {"text_bytes": corpus.num_bytes, "text_crc32": corpus.crc32})

    module = build(options.model, seed=options.seed)
    if options.weights is not None:
        from_numpy(load_weights(options.weights), module)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    net, optimizer = wrap(options, module.to(device))
    trainer = Trainer(
        loss_fn, optimizer, net, num_microbatches=options.microbatches, max_grad_norm=options.max_grad_norm,
        nonfinite="raise" if options.nonfinite == "raise" else "skip",
    )  # fmt: skip
    say(f"{options.model} ({num_params:,} parameters) on {_describe(device)}, {options.strategy}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")

    folder = None if options.checkpoint is None else Checkpoints(options.checkpoint, warn=say)
    with folder or contextlib.nullcontext() as checkpoints:
        num_batches = 0
        if checkpoints is not None:
            checkpoints.reserve()  # no other job saves there meanwhile
        if checkpoints is not None and (taken := checkpoints.latest_step()) is not None:
            if not options.resume:
                raise ValueError(f"checkpoint (={options.checkpoint!r}) holds step {taken}: resume, or another folder")
            step, position = checkpoints.restore(trainer)
            num_batches = batches_taken(position, options, corpus)
            if step >= options.steps:
                say(f"complete: the checkpoint in {options.checkpoint} has taken {step} of {options.steps} steps")
                return []
            say(f"resumed at step {step}")
        elif options.resume:
            say(f"no checkpoint in {options.checkpoint} yet: starting at step 0")
        progress, issued = take_steps(options, corpus, trainer, checkpoints, num_batches, say, on_step)
    planned = net.planned_collectives(num_microbatches=options.microbatches)
    for line in progress.summary(planned, [(one.kind, one.num_bytes) for one in issued], "issued"):
        say(line)
    return progress.reports


def take_steps(
    options: TrainOptions,
    corpus: Corpus,
    trainer: Trainer,
    checkpoints: Checkpoints | None,
    num_batches: int,
    say: Callable[[str], None],
    on_step: Callable[[StepReport], None],
) -> tuple[Progress, Sequence[Issued]]:
    """Trains up to the last step; gives the collectives of that step too. All ranks take the same branches."""
    place = {"rank": dist.get_rank(), "num_ranks": dist.get_world_size()}
    batches = corpus.validation_batches(options.batch_size, NUM_VALIDATION_BATCHES)
    held_out = [_to_device(local_rows(batch, place["rank"], place["num_ranks"])) for batch in batches]
    step = trainer.num_steps
    max_skips = MAX_SKIPS if options.nonfinite == "skip" else 0
    num_skips = 0  # in a row
    error: Exception | None = None
    progress, issued = Progress(options, corpus.context, step + 1), list[Issued]()
    with noted_signals(is_in_job=False) as signals:
        while step < options.steps and error is None:
            batch = _to_device(corpus.batch(num_batches, options.batch_size, seed=options.seed, **place))
            with record() as issued:
                metrics, seconds = stopwatch(trainer.step, batch, wait=_wait)
            step, num_batches, loss = step + 1, num_batches + 1, metrics["loss"]
            num_skips = num_skips + 1 if metrics.get("skipped") else 0
            gives_up = num_skips > max_skips
            if gives_up:
                error = skipped_too_often(loss, step, num_skips)
            elif step < options.steps and is_signalled(signals):
                error = Signalled(signals[0] if signals else signal.SIGTERM, f"after {step} of {options.steps} steps")
            is_last, is_due = error is not None or step == options.steps, options.is_due(step)
            if is_last or is_due or step % CHECK_REPLICAS_EVERY == 0:
                check_replicas(trainer)
            validation_loss = mean_loss(trainer, held_out) if is_due and error is None else None

            save_s = 0.0
            position = position_of(options, corpus, num_batches)
            if checkpoints is not None and gives_up:  # the state before, where --resume does not find it
                aside = f"{options.checkpoint}/{step}.nonfinite"
                with Checkpoints(aside) as folder:
                    if folder.latest_step() is None:
                        folder.save(trainer, step, data_position=position)
                say(f"the state before is kept in {aside}")
            elif checkpoints is not None and (is_last or (is_due and num_skips == 0)):
                save_s = stopwatch(partial(checkpoints.save, data_position=position), trainer, step, wait=_wait)[1]
            report = StepReport(step, loss, validation_loss, save_s)
            if line := progress.add(report, seconds, num_skips > 0):
                say(line)
            on_step(report)
    if checkpoints is not None:
        say(f"checkpoints in {options.checkpoint}: steps {', '.join(map(str, checkpoints.steps()))}")
    if error is not None:
        raise error
    return progress, issued


def mean_loss(trainer: Trainer, held_out: Sequence[Any]) -> float | None:
    """The loss of what is held out, which must be finite; None if nothing is."""
    if not held_out:
        return None
    begin_step(is_call=True)
    with torch.no_grad():
        total = torch.stack([loss_fn(trainer.net, batch) for batch in held_out]).mean()
    dist.all_reduce(total)
    mean = float(total) / dist.get_world_size()
    end_step()
    return check_validation(mean, trainer.num_steps)


def is_signalled(signals: Sequence[int]) -> bool:
    """Whether a signal ends the run after this step: all ranks agree on one."""
    told = torch.tensor([len(signals)], device=group_device())
    begin_step(is_call=True)
    dist.all_reduce(told)
    was_told = bool(told)
    end_step()
    return was_told


def wrap(options: TrainOptions, module: torch.nn.Module) -> tuple[DataParallel, Any]:
    """The module under its strategy, and what takes its steps."""
    settings = {"lr": options.learning_rate}
    optimizer_cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options.optimizer]
    settings |= {"weight_decay": 0.01} if options.optimizer == "adamw" else {}
    return make_training(options.strategy, module, optimizer_cls, strategy_arguments(options), **settings)


def strategy_arguments(options: TrainOptions) -> dict[str, Any]:
    """The cap of a strategy's buckets, if one is given; a ValueError if there is no such strategy, or no buckets."""
    if options.strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {options.strategy!r}: one of {', '.join(STRATEGIES)}")
    if options.bucket_mb is None:
        return {}
    if "bucket_mb" not in inspect.signature(STRATEGIES[options.strategy]).parameters:
        raise ValueError(f"strategy {options.strategy!r} has no buckets: leave out bucket_mb (={options.bucket_mb:g})")
    return {"bucket_mb": options.bucket_mb}


def _describe(device: torch.device) -> str:
    num_ranks = dist.get_world_size()
    if device.type == "cuda":
        return f"{num_ranks} x {torch.cuda.get_device_name(device)}"
    return "1 CPU device" if num_ranks == 1 else f"{num_ranks} CPU devices of {num_ranks} processes"


def _to_device(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(group_device()) for name, array in batch.items()}


def _wait(_: Any) -> None:
    if group_device().type == "cuda":
        torch.cuda.synchronize()
