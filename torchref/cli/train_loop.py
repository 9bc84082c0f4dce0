"""A training run of a language model, without a console: the twin of ``jaxddp.cli.train_loop``.

``train`` reads text, joins the ranks of its job, trains, and validates in between. It reports through two callbacks and
returns a summary. A step trains on ``batch_size x context`` tokens, split evenly over the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import signal
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from jaxddp.cli.interrupts import Signalled, noted_signals
from jaxddp.cli.resume import (
    check_position,
    check_resumes,
    num_batches_of,
    position_of,
    saying,
    set_aside,
    set_aside_after_error,
)
from jaxddp.cli.train_options import TrainOptions
from jaxddp.cli.train_report import StepReport, TrainSummary, is_due
from jaxddp.processes.job import find_job
from jaxddp.processes.watchdog import begin_step, end_step
from jaxddp.training import data
from jaxddp.training.clock import stopwatch, summarize

from ..agreement import check_alike, group_device
from ..checkpoint import Checkpoints
from ..communication.collectives import record
from ..communication.compression import make_compression
from ..interop import from_numpy
from ..launch import init_from_env
from ..models import build, loss_fn
from ..registry import STRATEGIES, make_strategy
from ..replicas import ReplicaError, check_replicas
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
    max_skips = options.max_skips if options.nonfinite == "skip" else 0  # counted here, so that the state can be saved
    say(f"{options.model} ({num_params:,} parameters) on {describe_devices(device)}, {options.strategy}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")

    def to_device(batch: data.Batch) -> Batch:
        return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}

    def wait(_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    size = options.batch_size // num_ranks
    mine = slice(rank * size, (rank + 1) * size)
    held_out = [
        to_device({name: array[mine] for name, array in batch.items()})
        for batch in corpus.validation_batches(options.batch_size, options.eval_batches)
    ]
    tokens_per_step = options.batch_size * config.context
    losses, step_seconds, skipped = [], [], []
    num_skips, is_owed = 0, False  # skips in a row; whether a checkpoint is due once a step is not skipped
    validation_loss: float | None = None
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if options.checkpoint is not None:
            checkpoints = stack.enter_context(Checkpoints(options.checkpoint, keep=options.keep, warn=say))
        started = _start(trainer, options, corpus, checkpoints, say)
        if started is None:
            dist.destroy_process_group()
            return None
        step, num_batches = started
        first_step = step + 1
        saved_step = step or None  # of the newest checkpoint
        restored: int | None = None  # step of the checkpoint, if ranks came to differ after it
        signals = stack.enter_context(noted_signals(is_in_job=False))
        while step < options.steps:
            step += 1
            batch = corpus.batch(num_batches, options.batch_size, seed=options.seed, rank=rank, num_ranks=num_ranks)
            with set_aside_after_error(checkpoints, step - 1, say):
                with record() as issued:
                    metrics, seconds = stopwatch(_step, trainer, to_device(batch), wait=wait)
            num_batches += 1
            losses.append(metrics["loss"])
            step_seconds.append(seconds)
            skipped.append(bool(metrics.get("skipped", False)))
            num_skips = num_skips + 1 if skipped[-1] else 0
            gives_up = num_skips > max_skips
            is_last = gives_up or (step < options.steps and _is_signalled(signals))
            is_owed = is_owed or is_due(step, options.checkpoint_every, options.steps)
            is_final, save_s = is_last or step == options.steps, 0.0
            is_saved = is_final or (is_owed and not num_skips)
            if is_saved or is_due(step, options.check_replicas_every, options.steps):
                try:
                    check_replicas(trainer)
                except ReplicaError as error:
                    newest = None if checkpoints is None else checkpoints.latest_step()
                    if options.replicas == "stop" or checkpoints is None or newest in (None, restored):
                        raise  # it is no accident a second time
                    step, saved = checkpoints.restore(trainer)
                    num_batches, restored = saved["examples"] // options.batch_size, newest
                    for of_steps in (losses, step_seconds, skipped):
                        del of_steps[max(0, step - first_step + 1) :]
                    saved_step, num_skips, is_owed = step, 0, False
                    say(f"{error}; restored step {step}")
                    continue
            if checkpoints is not None and gives_up and saved_step == step - num_skips:
                set_aside(checkpoints, saved_step, say)
            elif checkpoints is not None and is_saved:
                position = position_of(options, corpus, num_batches)
                save = functools.partial(checkpoints.save, data_position=position, set_aside=gives_up)
                goes_on = options.failed_save == "continue" and not is_final
                with saying(say) if goes_on else contextlib.nullcontext():
                    save_s = stopwatch(save, trainer, step, wait=wait)[1]
                    saved_step, is_owed = step, False
                if gives_up:
                    say(f"the state before is kept as {step}.nonfinite.npz in {options.checkpoint}")
            is_validated = not is_last and is_due(step, options.eval_every, options.steps)
            validation_loss = _mean_loss(net, held_out) if is_validated else None
            tokens_per_s = tokens_per_step / summarize(step_seconds[-20:]).median_ms * 1e3
            on_step(StepReport(step, losses[-1], validation_loss, tokens_per_s, save_s))
            if validation_loss is not None and not math.isfinite(validation_loss):
                with set_aside_after_error(checkpoints, step, say):
                    raise FloatingPointError(f"validation loss (={validation_loss}) after step {step} must be finite")
            if is_last:
                break
        if checkpoints is not None:
            say(f"checkpoints in {options.checkpoint}: steps {', '.join(map(str, checkpoints.steps()))}")
    if is_last:
        dist.destroy_process_group()
    if gives_up:
        raise FloatingPointError(
            f"loss (={losses[-1]}) and gradient of step {step} must be finite: the updates of this step and the "
            f"{max_skips} before it were skipped"
        )
    if is_last:
        raise Signalled(signals[0] if signals else signal.SIGTERM)

    summary = TrainSummary(
        options=options,
        num_params=num_params,
        params_bytes=params_bytes,
        source=corpus.source,
        num_bytes=corpus.num_bytes,
        devices=describe_devices(device),
        context=config.context,
        planned=planned_collectives(net, num_microbatches=options.microbatches),
        compiled=[(one.kind, one.num_bytes) for one in issued],
        compile_s=None,
        first_loss=losses[0],
        last_loss=losses[-1],
        validation_loss=validation_loss,
        num_validation_bytes=num_ranks * sum(batch["targets"].numel() for batch in held_out),
        step_timings=summarize(step_seconds),
        first_step=first_step,
        num_skipped=sum(skipped),
    )
    dist.destroy_process_group()
    return summary


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


def _start(
    trainer: Trainer,
    options: TrainOptions,
    corpus: data.Corpus,
    checkpoints: Checkpoints | None,
    say: Callable[[str], None],
) -> tuple[int, int] | None:
    """Restores the newest checkpoint; gives the steps and batches before it, None if no steps are left to take."""
    if checkpoints is None:
        return 0, 0
    checkpoints.reserve()
    taken = checkpoints.latest_step()
    check_alike({"step of the newest checkpoint": taken})  # hosts may name the folder otherwise, and must share it
    if taken is None:
        if options.resume:
            say(f"no checkpoint in {options.checkpoint} yet: starting at step 0")
        return 0, 0
    check_resumes(options, taken)
    about = checkpoints.about()  # of the newest that is not damaged
    check_position(about["data_position"], position_of(options, corpus, 0), options, about["step"], say)
    step, saved = checkpoints.restore(trainer)
    if step != about["step"]:  # its tensors are damaged
        about = checkpoints.about(step)
    if step >= options.steps:
        say(f"complete: the checkpoint in {options.checkpoint} has taken {step} of {options.steps} steps")
        return None
    num_batches = num_batches_of(saved, options)
    say(f"resumed at step {step}, which {about['strategy']} saved on {about['num_ranks']} ranks")
    return step, num_batches


def _is_signalled(signals: list[int]) -> bool:
    """Whether the run ends after this step: if any rank was told to."""
    told = torch.tensor([len(signals)], device=group_device())
    begin_step(is_call=True)
    dist.all_reduce(told)
    was_told = bool(told)
    end_step()
    return was_told


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
    try:
        if path.endswith(".safetensors"):
            return _load_safetensors(path)
        with np.load(path) as weights:
            return dict(weights)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"file {path!r} must hold weights, it is truncated or another kind: {error}") from error


def _load_safetensors(path: str) -> dict[str, np.ndarray]:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError("the package safetensors is not installed: pip install 'jaxddp[safetensors]'") from error
    try:
        tensors = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    # NumPy has no bfloat16; float32 holds it exactly.
    return {name: (one.float() if one.dtype == torch.bfloat16 else one).numpy() for name, one in tensors.items()}


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
