"""A training run of a language model, without a console: the twin of ``jaxddp.cli.train_loop``.

``train`` reads text, joins the ranks of its job, trains, and validates in between. It reports through two callbacks and
returns a summary. A step trains on ``batch_size x context`` tokens, split evenly over the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from jaxddp.checkpoint.weights import as_native, load_weights
from jaxddp.cli.interrupts import noted_signals
from jaxddp.cli.train_options import TrainOptions
from jaxddp.cli.train_report import StepReport, TrainSummary
from jaxddp.cli.train_run import TrainRun
from jaxddp.processes.job import find_job
from jaxddp.processes.watchdog import begin_step, end_step
from jaxddp.training import data
from jaxddp.training.clock import stopwatch

from ..agreement import check_alike, group_device
from ..checkpoint import Checkpoints
from ..communication.collectives import Issued, record
from ..communication.compression import make_compression
from ..interop import from_numpy
from ..launch import init_from_env
from ..models import build, loss_fn
from ..registry import STRATEGIES, make_strategy
from ..replicas import check_replicas
from ..strategy import DataParallel, planned_collectives
from ..train import Optimizer, Trainer

Batch = dict[str, torch.Tensor]


def train(
    options: TrainOptions,
    say: Callable[[str], None] = lambda text: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> TrainSummary | None:
    """Trains a language model.

    Returns:
        The summary; None if a resumed run has already taken all its steps.

    Raises:
        ValueError: If the options do not fit together, the data or the job.
        OSError: If the data or the weights cannot be read, or a checkpoint cannot be written.
        FloatingPointError: If the loss, the gradient or the validation loss is not finite.
        ReplicaError: If ranks differ in what each has in full, and ``replicas`` does not restore a checkpoint.
        Signalled: After one of ``SIGNALS``, once the step is finished and saved.
    """
    config = options.config
    corpus = data.Corpus(options.data, context=config.context)
    device = _start_ranks(options)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    options.check_batch_size(num_ranks)
    check_alike(options.fingerprint() | {"text_bytes": corpus.num_bytes, "text_crc32": corpus.crc32})

    module = build(options.model, seed=options.seed)
    if options.weights is not None:
        from_numpy(_load_weights(options.weights), module)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    params_bytes = sum(parameter.nbytes for parameter in module.parameters())
    net, optimizer = _wrap(options, module.to(device))
    trainer = Trainer(
        loss_fn, optimizer, net, num_microbatches=options.microbatches, max_grad_norm=options.max_grad_norm,
        nonfinite="raise" if options.nonfinite == "raise" else "skip", max_skips=options.max_skips + 1,
    )  # fmt: skip
    say(f"{options.model} ({num_params:,} parameters) on {describe_devices(device)}, {options.strategy}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")

    size = options.batch_size // num_ranks
    mine = slice(rank * size, (rank + 1) * size)
    held_out = [
        _to_device({name: array[mine] for name, array in batch.items()})
        for batch in corpus.validation_batches(options.batch_size, options.eval_batches)
    ]
    opened = Checkpoints(options.checkpoint, keep=options.keep, warn=say) if options.checkpoint is not None else None
    with opened or contextlib.nullcontext() as checkpoints:
        if checkpoints is not None:
            checkpoints.reserve()
            # Hosts may name the folder otherwise, and must share it.
            check_alike({"step of the newest checkpoint": checkpoints.latest_step()})
        run = _Run(options, corpus, trainer, held_out, checkpoints, say, rank, num_ranks)
        if not run.resume():
            dist.destroy_process_group()
            return None
        with noted_signals(is_in_job=False) as run.signals:
            run.take_steps(on_step)
    if run.error is not None:
        dist.destroy_process_group()
        raise run.error
    summary = run.summary(
        num_params=num_params,
        params_bytes=params_bytes,
        devices=describe_devices(device),
        planned=planned_collectives(net, num_microbatches=options.microbatches),
        compiled=[(one.kind, one.num_bytes) for one in run.issued],
        compile_s=None,
        num_validation_bytes=num_ranks * sum(batch["targets"].numel() for batch in held_out),
    )
    dist.destroy_process_group()
    return summary


class _Run(TrainRun):
    """A run with a trainer of this package."""

    issued: Sequence[Issued] = ()  # collectives of the last step

    def _take_step(self, batch: data.Batch) -> tuple[dict[str, float], float]:
        with record() as self.issued:
            return stopwatch(_step, self.trainer, _to_device(batch), wait=_wait)

    def _is_signalled(self) -> bool:
        told = torch.tensor([len(self.signals)], device=group_device())
        begin_step(is_call=True)
        dist.all_reduce(told)
        was_told = bool(told)
        end_step()
        return was_told

    def _check_replicas(self) -> None:
        check_replicas(self.trainer)

    def _restore(self) -> tuple[int, Any]:
        return self.checkpoints.restore(self.trainer)

    def _save(self, position: Any, set_aside: bool) -> float:
        save = functools.partial(self.checkpoints.save, data_position=position, set_aside=set_aside)
        return stopwatch(save, self.trainer, self.step, wait=_wait)[1]

    def _mean_loss(self) -> float | None:
        return _mean_loss(self.trainer.net, self.held_out)


def check(options: TrainOptions) -> None:
    """Refuses options before ranks start, of which each would refuse them.

    Raises:
        ValueError: If they do not fit together, or the data.
        OSError: If the data or the weights cannot be read.
    """
    config = options.config
    _strategy_arguments(options)
    if options.data is not None:
        data.Corpus(options.data, context=config.context)
    if options.weights is not None:
        _load_weights(options.weights)


def describe_devices(device: torch.device) -> str:
    """Describes the ranks."""
    num_ranks = dist.get_world_size()
    if device.type == "cuda":
        return f"{num_ranks} x {torch.cuda.get_device_name(device)}"
    return "1 CPU device" if num_ranks == 1 else f"{num_ranks} CPU devices of {num_ranks} processes"


def _to_device(batch: data.Batch) -> Batch:
    return {name: torch.from_numpy(array).to(group_device()) for name, array in batch.items()}


def _wait(_: Any) -> None:
    if group_device().type == "cuda":
        torch.cuda.synchronize()


def _step(trainer: Trainer, batch: Batch) -> dict[str, float]:
    try:
        return trainer.step(batch)
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        # torch refuses a factor of an update that its dtype does not hold.
        raise FloatingPointError(f"updates must be finite: {error}") from error


@torch.no_grad()
def _mean_loss(net: DataParallel, batches: list[Batch]) -> float | None:
    if not batches:
        return None
    begin_step(is_call=True)
    total = torch.stack([loss_fn(net, batch) for batch in batches]).mean()
    dist.all_reduce(total)
    mean = float(total) / net.num_ranks
    end_step()
    return mean


def _start_ranks(options: TrainOptions) -> torch.device:
    """Joins the job that this process is in."""
    job = find_job()
    num_ranks = 1 if job is None else job.num_processes
    if options.devices not in (None, num_ranks):
        raise ValueError(f"devices (={options.devices}) must be the job's processes (={num_ranks}), a rank each")
    return init_from_env("gloo" if options.simulate else None, stuck_s=options.stuck_s)


def _load_weights(path: str) -> dict[str, np.ndarray]:
    return {name: as_native(array) for name, array in load_weights(path).items()}


def _wrap(options: TrainOptions, module: torch.nn.Module) -> tuple[DataParallel, Optimizer]:
    """The module under its strategy, and what takes its steps."""
    arguments = _strategy_arguments(options)
    optimizer_cls, settings = _optimizer(options)
    if STRATEGIES[options.strategy].owns_optimizer:
        net: Any = make_strategy(options.strategy, module, optimizer_cls=optimizer_cls, **arguments, **settings)
        return net, net
    net = make_strategy(options.strategy, module, **arguments)
    return net, optimizer_cls(net.parameters(), **settings)


def _strategy_arguments(options: TrainOptions) -> dict[str, Any]:
    if options.strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {options.strategy!r}: one of {', '.join(STRATEGIES)}")
    arguments: dict[str, Any] = {"compression": make_compression(options.compression)}
    if options.bucket_mb is not None:
        if "bucket_mb" not in inspect.signature(STRATEGIES[options.strategy]).parameters:
            raise ValueError(
                f"strategy {options.strategy!r} has no buckets: leave out bucket_mb (={options.bucket_mb:g})"
            )
        arguments["bucket_mb"] = options.bucket_mb
    return arguments


def _optimizer(options: TrainOptions) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, float]]:
    if options.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": options.learning_rate, "weight_decay": 0.01}
    return {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options.optimizer], {"lr": options.learning_rate}
