"""The program of ``python -m torchref train``: a language model of bytes, trained data-parallel.

The twin of ``jaxddp/cli/train_program.py``. A rank is a process.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from jaxddp.checkpoint.weights import as_native, load_weights
from jaxddp.cli.train_loop import Training, take_steps
from jaxddp.cli.train_options import NUM_VALIDATION_BATCHES, StepReport, TrainOptions, batches_taken, check_validation
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
from ..registry import STRATEGIES, make_strategy
from ..replicas import check_replicas
from ..strategy import DataParallel, planned_collectives
from ..train import Optimizer, Trainer, local_rows


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
        from_numpy(read_weights(options.weights), module)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    net, optimizer = wrap(options, module.to(device))
    trainer = Trainer(
        loss_fn, optimizer, net, num_microbatches=options.microbatches, max_grad_norm=options.max_grad_norm,
        nonfinite="raise" if options.nonfinite == "raise" else "skip",
    )  # fmt: skip
    say(f"{options.model} ({num_params:,} parameters) on {_describe(device)}, {options.strategy}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")

    folder = None if options.checkpoint is None else Checkpoints(options.checkpoint, keep=options.keep, warn=say)
    with folder or contextlib.nullcontext() as checkpoints:
        num_batches = 0
        if checkpoints is not None:
            checkpoints.reserve()  # no other job saves there meanwhile
        if checkpoints is not None and (taken := checkpoints.latest_step()) is not None:
            if not options.resume:
                raise ValueError(f"checkpoint (={options.checkpoint!r}) holds step {taken}: resume, or another folder")
            step, position = checkpoints.restore(trainer)
            num_batches = batches_taken(position, options, corpus, say)
            if step >= options.steps:
                say(f"complete: the checkpoint in {options.checkpoint} has taken {step} of {options.steps} steps")
                return []
            say(f"resumed at step {step}")
        elif options.resume:
            say(f"no checkpoint in {options.checkpoint} yet: starting at step 0")
        issued: list[Issued] = []  # by the last step
        training = training_of(options, corpus, trainer, checkpoints, issued)
        progress, error = take_steps(options, corpus, training, trainer.num_steps, num_batches, say, on_step)
        if checkpoints is not None:
            say(f"checkpoints in {options.checkpoint}: steps {', '.join(map(str, checkpoints.steps()))}")
    if error is not None:
        raise error
    planned = planned_collectives(net, num_microbatches=options.microbatches)
    for line in progress.summary(planned, [(one.kind, one.num_bytes) for one in issued], "issued"):
        say(line)
    return progress.reports


def training_of(
    options: TrainOptions, corpus: Corpus, trainer: Trainer, checkpoints: Checkpoints | None, issued: list[Issued]
) -> Training:
    """What the loop calls; ``issued`` gets the collectives of the last step."""
    place = {"seed": options.seed, "rank": dist.get_rank(), "num_ranks": dist.get_world_size()}
    batches = corpus.validation_batches(options.batch_size, NUM_VALIDATION_BATCHES)
    held_out = [_to_device(local_rows(batch, place["rank"], place["num_ranks"])) for batch in batches]

    def step(number: int) -> tuple[Any, float]:
        batch = _to_device(corpus.batch(number, options.batch_size, **place))
        with record() as of_step:
            found = stopwatch(take_step, trainer, batch, wait=_wait)
        issued[:] = of_step
        return found

    return Training(
        step, is_signalled, lambda: check_replicas(trainer), lambda: mean_loss(trainer, held_out),
        None if checkpoints is None else partial(checkpoints.save, trainer),
    )  # fmt: skip


def take_step(trainer: Trainer, batch: Any) -> dict[str, float]:
    """A step; torch refuses a factor of an update that its dtype does not hold."""
    try:
        return trainer.step(batch)
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        raise FloatingPointError(f"updates must be finite: {error}") from error


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


def is_signalled(step: int, signals: Sequence[int]) -> bool:
    """Whether a signal ends the run after this step: all ranks agree on one."""
    told = torch.tensor([len(signals)], device=group_device())
    begin_step(is_call=True)
    dist.all_reduce(told)
    was_told = bool(told)
    end_step()
    return was_told


def wrap(options: TrainOptions, module: torch.nn.Module) -> tuple[DataParallel, Optimizer]:
    """The module under its strategy, and what takes its steps."""
    arguments, settings = strategy_arguments(options), {"lr": options.learning_rate}
    optimizer_cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options.optimizer]
    settings |= {"weight_decay": 0.01} if options.optimizer == "adamw" else {}
    if STRATEGIES[options.strategy].owns_optimizer:
        net: Any = make_strategy(options.strategy, module, optimizer_cls=optimizer_cls, **arguments, **settings)
        return net, net
    net = make_strategy(options.strategy, module, **arguments)
    return net, optimizer_cls(net.parameters(), **settings)


def strategy_arguments(options: TrainOptions) -> dict[str, Any]:
    """The cap of a strategy's buckets, if one is given; a ValueError if there is no such strategy, or no buckets."""
    if options.strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {options.strategy!r}: one of {', '.join(STRATEGIES)}")
    if options.bucket_mb is None:
        return {}
    if "bucket_mb" not in inspect.signature(STRATEGIES[options.strategy]).parameters:
        raise ValueError(f"strategy {options.strategy!r} has no buckets: leave out bucket_mb (={options.bucket_mb:g})")
    return {"bucket_mb": options.bucket_mb}


def read_weights(path: str) -> dict[str, Any]:
    """Reads parameters under PyTorch's names; numbers that NumPy lacks become float32."""
    return {name: as_native(array) for name, array in load_weights(path).items()}


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
