"""The program of ``python -m jaxddp train``: a language model of bytes, trained data-parallel.

A step trains on ``batch_size x context`` tokens, split evenly over the ranks. Validations, checks of replicas and
checkpoints come between steps. ``torchref/cli/train.py`` is the twin.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jaxddp

from ..mesh import mesh_of_machine
from ..models import build
from ..processes.job import find_job
from ..training.agreement import check_alike
from ..training.clock import stopwatch
from ..training.data import Corpus
from .interrupts import Signalled, noted_signals
from .train import (
    CHECK_REPLICAS_EVERY,
    DEFAULT_SIMULATED_DEVICES,
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


def train(
    options: TrainOptions,
    say: Callable[[str], None] = lambda line: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> list[StepReport]:
    """Trains a language model: ``say`` gets lines of text, ``on_step`` a report after each step.

    Returns the reports; none if a resumed run has already taken all its steps.

    Raises:
        ValueError: If the options do not fit together, the data, the machine or the checkpoint.
        OSError: If the data cannot be read, or a checkpoint cannot be written.
        FloatingPointError: If training met numbers that are not finite, and ``nonfinite`` does not skip them.
        ReplicaError: If ranks differ in what each has in full.
        Signalled: After a signal of a scheduler, once the step is finished and saved.
    """
    jaxddp.keep_freed_memory()
    strategy = make_strategy(options)
    corpus = Corpus(options.data, context=options.config.context)
    mesh = start_ranks(options)
    options.check_batch_size(mesh.size)
    check_alike(options.fingerprint | {"text_bytes": corpus.num_bytes, "text_crc32": corpus.crc32})

    loss_fn, params = build(options.model, seed=options.seed)
    if options.weights is not None:
        params = load_params(options.weights, params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    trainer = jaxddp.Trainer(
        loss_fn, make_optimizer(options), strategy, mesh,
        num_microbatches=options.microbatches, max_grad_norm=options.max_grad_norm,
        compute_dtype=options.compute_dtype, nonfinite="raise" if options.nonfinite == "raise" else "skip",
    )  # fmt: skip
    say(f"{options.model} ({num_params:,} parameters) on {describe_devices(mesh)}, {strategy.name}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")

    with open_checkpoints(options, say) as checkpoints:
        if checkpoints is not None and checkpoints.latest_step() is not None:
            state, num_batches = restore(options, corpus, trainer, checkpoints, shapes)
            if int(state.step) >= options.steps:
                say(f"complete: the checkpoint in {options.checkpoint} has taken {state.step} of {options.steps} steps")
                return []
            say(f"resumed at step {state.step}")
        else:
            if options.resume:
                say(f"no checkpoint in {options.checkpoint} yet: starting at step 0")
            state, num_batches = trainer.init(params, seed=options.seed), 0
        del params  # the state holds copies

        batch = jax.eval_shape(lambda: corpus.batch(0, options.batch_size, seed=options.seed))  # of all ranks
        planned = trainer.planned(state, batch)
        program, compile_s = stopwatch(trainer.compile, state, batch)
        say(f"compiled in {compile_s:.1f} s")
        progress = take_steps(options, corpus, trainer, checkpoints, state, num_batches, say, on_step)
    for line in progress.summary(planned, jaxddp.gradient_collectives(program), "compiled"):
        say(line)
    return progress.reports


def restore(
    options: TrainOptions, corpus: Corpus, trainer: jaxddp.Trainer, checkpoints: jaxddp.Checkpoints, shapes: Any
) -> tuple[jaxddp.TrainState, int]:
    """The newest state, and how many batches it has seen."""
    if not options.resume:
        step = checkpoints.latest_step()
        raise ValueError(f"checkpoint (={options.checkpoint!r}) holds step {step}: resume, or another folder")
    state, position = checkpoints.restore(trainer, shapes)
    return state, batches_taken(position, options, corpus)


def take_steps(
    options: TrainOptions,
    corpus: Corpus,
    trainer: jaxddp.Trainer,
    checkpoints: jaxddp.Checkpoints | None,
    state: jaxddp.TrainState,
    num_batches: int,
    say: Callable[[str], None],
    on_step: Callable[[StepReport], None],
) -> Progress:
    """Trains from a state up to the last step; raises as ``train``. All processes of a job take the same branches."""
    place = {"seed": options.seed, "rank": jax.process_index(), "num_ranks": jax.process_count()}
    held_out = [*map(jaxddp.local_rows, corpus.validation_batches(options.batch_size, NUM_VALIDATION_BATCHES))]
    step = int(state.step)
    max_skips = MAX_SKIPS if options.nonfinite == "skip" else 0
    num_skips = 0  # in a row
    error: Exception | None = None
    progress = Progress(options, corpus.context, step + 1)
    with noted_signals(is_in_job=jax.process_count() > 1) as signals:
        while step < options.steps and error is None:
            batch = corpus.batch(num_batches, options.batch_size, **place)
            (state, metrics), seconds = stopwatch(trainer.step, state, batch)
            step, num_batches, loss = step + 1, num_batches + 1, float(metrics["loss"])
            num_skips = num_skips + 1 if metrics.get("skipped") else 0
            gives_up = num_skips > max_skips
            if gives_up:
                error = skipped_too_often(loss, step, num_skips)
            elif step < options.steps and is_signalled(step, signals):
                error = Signalled(signals[0] if signals else signal.SIGTERM, f"after {step} of {options.steps} steps")
            is_last, is_due = error is not None or step == options.steps, options.is_due(step)
            if is_last or is_due or step % CHECK_REPLICAS_EVERY == 0:
                jaxddp.check_replicas(trainer, state)
            validation_loss = mean_loss(trainer, state, held_out) if is_due and error is None else None

            save_s = 0.0
            position = position_of(options, corpus, num_batches)
            if checkpoints is not None and gives_up:  # the state before, where --resume does not find it
                aside = f"{options.checkpoint}/{step}.nonfinite"
                with jaxddp.Checkpoints(aside) as folder:
                    if folder.latest_step() is None:
                        folder.save(trainer, state, data_position=position)
                say(f"the state before is kept in {aside}")
            elif checkpoints is not None and (is_last or (is_due and num_skips == 0)):
                save_s = stopwatch(partial(checkpoints.save, data_position=position), trainer, state)[1]
            report = StepReport(step, loss, validation_loss, save_s)
            if line := progress.add(report, seconds, num_skips > 0):
                say(line)
            on_step(report)
    if checkpoints is not None:
        say(f"checkpoints in {options.checkpoint}: steps {', '.join(map(str, checkpoints.steps()))}")
    if error is not None:
        raise error
    return progress


def mean_loss(trainer: jaxddp.Trainer, state: jaxddp.TrainState, held_out: Sequence[Any]) -> float | None:
    """The loss of what is held out; None if nothing is.

    Raises:
        FloatingPointError: If it is not finite.
    """
    losses = [float(trainer.evaluate(state, batch)) for batch in held_out]
    return check_validation(sum(losses) / len(losses), int(state.step)) if losses else None


def is_signalled(step: int, signals: Sequence[int]) -> bool:
    """Whether a signal ends the run after this step: all processes agree on one."""
    if jax.process_count() > 1:
        return multihost_utils.reached_preemption_sync_point(step)
    return bool(signals)


@contextlib.contextmanager
def open_checkpoints(options: TrainOptions, say: Callable[[str], None]) -> Iterator[jaxddp.Checkpoints | None]:
    """The folder of checkpoints, in which no other job saves meanwhile."""
    if options.checkpoint is None:
        yield None
        return
    with jaxddp.Checkpoints(options.checkpoint, warn=say) as checkpoints:
        checkpoints.reserve()
        yield checkpoints


def load_params(path: str, like: Any) -> Any:
    """Reads parameters under PyTorch's names."""
    from ..checkpoint.interop import from_numpy  # late: Flax is slow to import
    from ..checkpoint.weights import load_weights

    return from_numpy(load_weights(path), like)


def start_ranks(options: TrainOptions) -> Mesh:
    """The ranks of the job that this process is in, else those of this machine."""
    job = find_job()
    if job is None:
        return mesh_of_machine(options.devices, DEFAULT_SIMULATED_DEVICES)
    num_ranks = options.devices or job.num_processes
    if num_ranks % job.num_processes:
        raise ValueError(f"devices (={num_ranks}) must be divisible by the job's processes (={job.num_processes})")
    jax.config.update("jax_num_cpu_devices", num_ranks // job.num_processes)  # GPUs are what the launcher gave
    jaxddp.start_process(stuck_s=options.stuck_s, preemption_service=True)
    return jaxddp.data_mesh(options.devices)


def make_strategy(options: TrainOptions) -> jaxddp.Strategy:
    """The strategy by its name, with a cap of its buckets if one is given."""
    if options.bucket_mb is None:
        return jaxddp.make_strategy(options.strategy)
    factory = jaxddp.STRATEGIES.get(options.strategy)
    if factory is not None and "bucket_mb" not in inspect.signature(factory).parameters:
        raise ValueError(f"strategy {options.strategy!r} has no buckets: leave out bucket_mb (={options.bucket_mb:g})")
    return jaxddp.make_strategy(options.strategy, bucket_mb=options.bucket_mb)


def make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """The optimizer by its name."""
    if options.optimizer == "adamw":
        return optax.adamw(options.learning_rate, weight_decay=0.01)
    return getattr(optax, options.optimizer)(options.learning_rate)


def describe_devices(mesh: Mesh) -> str:
    """Describes the ranks, and says whether they are simulated."""
    device = mesh.devices.flat[0]
    if device.platform != "cpu":
        return f"{mesh.size} x {device.device_kind}"
    if jax.process_count() > 1:
        return f"{mesh.size} CPU devices of {jax.process_count()} processes"
    return "1 CPU device" if mesh.size == 1 else f"{mesh.size} simulated CPU devices on {os.cpu_count()} cores"
