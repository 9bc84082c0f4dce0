"""A training run of a language model, without a console.

``train`` reads text, starts the ranks, compiles the step, trains, and validates and saves in between. It reports
through two callbacks and returns a summary. A step trains on ``batch_size x context`` tokens, split evenly over the
ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ..communication.compression import make_compression
from ..compiled.schedule import gradient_collectives
from ..mesh import data_mesh, mesh_of_machine, simulate_devices
from ..models import build
from ..processes.job import find_job
from ..processes.start import local_rows, start_process
from ..registry import STRATEGIES, make_strategy
from ..strategy import Strategy
from ..training.agreement import check_alike
from ..training.allocator import keep_freed_memory
from ..training.clock import stopwatch, summarize
from ..training.data import Batch, Corpus
from ..training.replicas import ReplicaError
from ..training.train import Trainer, TrainState
from ..training.validation import abstract
from .interrupts import Signalled, noted_signals
from .resume import check_position, check_resumes, num_batches_of, position_of, saying, set_aside, set_aside_after_error
from .train_options import DEFAULT_SIMULATED_DEVICES, TrainOptions
from .train_report import StepReport, TrainSummary, is_due

if TYPE_CHECKING:
    from ..checkpoint.checkpoints import Checkpoints


def train(
    options: TrainOptions,
    say: Callable[[str], None] = lambda text: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> TrainSummary | None:
    """Trains a language model.

    Returns:
        The summary; None if a resumed run has already taken all its steps.

    Raises:
        ValueError: If the options do not fit together, the data or the machine.
        OSError: If the data cannot be read, or a checkpoint cannot be written.
        FloatingPointError: If training met numbers that are not finite, and ``nonfinite`` does not skip them.
        ReplicaError: If ranks differ in what each has in full, and ``replicas`` does not restore a checkpoint.
        Signalled: After one of ``SIGNALS``, once the step is finished and saved.
    """
    keep_freed_memory()
    strategy = _make_strategy(options)
    config = options.config
    corpus = Corpus(options.data, context=config.context)
    mesh = _start_ranks(options)
    process, num_processes = jax.process_index(), jax.process_count()  # a process reads its own rows of a batch
    options.check_batch_size(int(mesh.size))
    check_alike(options.fingerprint() | {"text_bytes": corpus.num_bytes, "text_crc32": corpus.crc32})

    loss_fn, params = build(options.model, seed=options.seed)
    if options.weights is not None:
        from ..checkpoint.interop import from_numpy  # late: Orbax is slow to import
        from ..checkpoint.weights import as_native, load_weights

        weights = {name: as_native(array) for name, array in load_weights(options.weights).items()}
        params = from_numpy(weights, params)
    trainer = Trainer(
        loss_fn, _make_optimizer(options), strategy, mesh,
        num_microbatches=options.microbatches, max_grad_norm=options.max_grad_norm,
        nonfinite="raise" if options.nonfinite == "raise" else "skip", max_skips=options.max_skips + 1,
        compute_dtype=options.compute_dtype, loss_scale="dynamic" if options.compute_dtype == "float16" else None,
    )  # fmt: skip
    max_skips = options.max_skips if options.nonfinite == "skip" else 0  # counted here, so that the state can be saved
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    params_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    say(f"{options.model} ({num_params:,} parameters) on {describe_devices(mesh)}, {strategy.name}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")

    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(_open_checkpoints(options, say))
        started = _start(trainer, params, options, corpus, checkpoints, say)
        if started is None:
            return None
        state, num_batches = started
        params = abstract(params)  # the state holds copies
        del started
        step = num_earlier_steps = int(state.step)

        batch = jax.eval_shape(lambda: corpus.batch(0, options.batch_size, seed=options.seed))  # of all ranks
        planned = trainer.planned(state, batch)
        program, compile_s = stopwatch(trainer.compile, state, batch)
        compiled = gradient_collectives(program)
        say(f"compiled in {compile_s:.1f} s")

        held_out = [local_rows(b) for b in corpus.validation_batches(options.batch_size, options.eval_batches)]
        tokens_per_step = options.batch_size * config.context
        losses, step_seconds, skipped = [], [], []
        validation_loss: float | None = None
        restored: int | None = None  # step of the checkpoint, if ranks came to differ after it
        saved_step = step or None  # of the newest checkpoint
        num_skips, is_owed = 0, False  # skips in a row; whether a checkpoint is due once a step is not skipped
        signals = stack.enter_context(noted_signals(is_in_job=num_processes > 1))
        while step < options.steps:
            step += 1
            batch = corpus.batch(
                num_batches, options.batch_size, seed=options.seed, rank=process, num_ranks=num_processes
            )
            with set_aside_after_error(checkpoints, step - 1, say):
                (state, metrics), seconds = stopwatch(trainer.step, state, batch)
            num_batches += 1
            losses.append(float(metrics["loss"]))
            step_seconds.append(seconds)
            skipped.append(bool(metrics.get("skipped", False)))
            num_skips = num_skips + 1 if skipped[-1] else 0
            gives_up = num_skips > max_skips
            if checkpoints is not None and checkpoints.has_failed and options.failed_save == "stop":
                if num_processes == 1:
                    checkpoints.wait()  # raises
                signal.raise_signal(signal.SIGTERM)  # so that all processes get to the next save, which raises
            is_last = gives_up or (step < options.steps and _is_signalled(signals, step))
            is_owed = is_owed or is_due(step, options.checkpoint_every, options.steps)
            is_saved = is_last or step == options.steps or (is_owed and not num_skips)
            if is_saved or is_due(step, options.check_replicas_every, options.steps):
                try:
                    trainer.check_replicas(state)
                except ReplicaError as error:
                    if options.replicas == "stop" or checkpoints is None:
                        raise
                    newest = checkpoints.latest_step()
                    if newest in (None, restored):  # it is no accident a second time
                        raise
                    state, saved = checkpoints.restore(trainer, params)
                    step, num_batches, restored = int(state.step), saved["examples"] // options.batch_size, newest
                    for of_steps in (losses, step_seconds, skipped):
                        del of_steps[max(0, step - num_earlier_steps) :]
                    saved_step, num_skips, is_owed = step, 0, False
                    say(f"{error}; restored step {step}")
                    continue
            save_s = 0.0
            if checkpoints is not None and gives_up:
                if saved_step == step - num_skips:
                    set_aside(checkpoints, saved_step, say)
                else:
                    position = position_of(options, corpus, num_batches)
                    checkpoints.save(trainer, state, data_position=position, set_aside=True)
                    say(f"the state before is kept as {step}.nonfinite in {options.checkpoint}")
            elif checkpoints is not None and is_saved:
                saved_step, is_owed = step, False
                goes_on = options.failed_save == "continue"
                with saying(say) if goes_on else contextlib.nullcontext():
                    checkpoints.wait()
                is_final = is_last or step == options.steps
                with saying(say) if goes_on and not is_final else contextlib.nullcontext():
                    position = position_of(options, corpus, num_batches)
                    save_s = stopwatch(functools.partial(checkpoints.save, data_position=position), trainer, state)[1]
            is_validated = not is_last and is_due(step, options.eval_every, options.steps)
            validation_loss = _mean_loss(trainer, state, held_out) if is_validated else None
            tokens_per_s = tokens_per_step / summarize(step_seconds[-20:]).median_ms * 1e3
            on_step(StepReport(step, losses[-1], validation_loss, tokens_per_s, save_s))
            if validation_loss is not None and not math.isfinite(validation_loss):
                with set_aside_after_error(checkpoints, step, say):
                    raise FloatingPointError(f"validation loss (={validation_loss}) after step {step} must be finite")
            if is_last:
                break
        if checkpoints is not None:
            checkpoints.wait()
            say(f"checkpoints in {options.checkpoint}: steps {', '.join(map(str, checkpoints.steps()))}")
    if gives_up:
        raise FloatingPointError(
            f"loss (={losses[-1]}) and gradient of step {step} must be finite: the updates of this step and the "
            f"{max_skips} before it were skipped"
        )
    if is_last:
        raise Signalled(signals[0] if signals else signal.SIGTERM)

    return TrainSummary(
        options=options,
        num_params=num_params,
        params_bytes=params_bytes,
        source=corpus.source,
        num_bytes=corpus.num_bytes,
        devices=describe_devices(mesh),
        context=config.context,
        planned=planned,
        compiled=compiled,
        compile_s=compile_s,
        first_loss=losses[0],
        last_loss=losses[-1],
        validation_loss=validation_loss,
        num_validation_bytes=num_processes * sum(batch["targets"].size for batch in held_out),
        step_timings=summarize(step_seconds),
        first_step=num_earlier_steps + 1,
        num_skipped=sum(skipped),
    )


def describe_devices(mesh: Mesh) -> str:
    """Describes the ranks, and says whether they are simulated."""
    device = mesh.devices.flat[0]
    if device.platform != "cpu":
        return f"{mesh.size} x {device.device_kind}"
    if mesh.size == 1:
        return "1 CPU device"
    if jax.process_count() > 1:
        return f"{mesh.size} CPU devices of {jax.process_count()} processes"
    return f"{mesh.size} simulated CPU devices on {os.cpu_count()} cores"


def _open_checkpoints(
    options: TrainOptions, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[Checkpoints | None]:
    if options.checkpoint is None:
        return contextlib.nullcontext()
    from ..checkpoint.checkpoints import Checkpoints  # late: Orbax is slow to import

    return Checkpoints(options.checkpoint, keep=options.keep, warn=say)


def _start(
    trainer: Trainer, params: Any, options: TrainOptions, corpus: Corpus, checkpoints: Any, say: Callable[[str], None]
) -> tuple[TrainState, int] | None:
    """Makes the initial state and counts the batches before it; None if no steps are left to take."""
    if checkpoints is not None:
        checkpoints.reserve()
    taken = None if checkpoints is None else checkpoints.latest_step()
    if checkpoints is None or taken is None:
        if options.resume:
            say(f"no checkpoint in {options.checkpoint} yet: starting at step 0")
        return trainer.init(params, seed=options.seed), 0
    check_resumes(options, taken)
    about = checkpoints.about()  # of the newest that is not damaged
    taken = about["step"]
    check_position(about["data_position"], position_of(options, corpus, 0), options, taken, say)
    state, saved = checkpoints.restore(trainer, params)
    if taken != int(state.step):  # its arrays are damaged
        taken = int(state.step)
        about = checkpoints.about(taken)
    if taken >= options.steps:
        say(f"complete: the checkpoint in {options.checkpoint} has taken {taken} of {options.steps} steps")
        return None
    num_batches = num_batches_of(saved, options)
    say(f"resumed at step {taken}, which {about['strategy']} saved on {about['num_ranks']} ranks")
    return state, num_batches


def _is_signalled(signals: list[int], step: int) -> bool:
    """Whether the run ends after this step: all processes of a job agree on one."""
    if jax.process_count() > 1:
        return multihost_utils.reached_preemption_sync_point(step)
    return bool(signals)


def _mean_loss(trainer: Trainer, state: TrainState, batches: list[Batch]) -> float | None:
    losses = [float(trainer.evaluate(state, batch)) for batch in batches]
    return sum(losses) / len(losses) if losses else None


def _start_ranks(options: TrainOptions) -> Mesh:
    """The ranks of the job that this process is in, else those of this machine."""
    if job := find_job():
        num_ranks = options.devices or job.num_processes
        if num_ranks % job.num_processes:
            raise ValueError(f"devices (={num_ranks}) must be divisible by the job's processes (={job.num_processes})")
        jax.config.update("jax_num_cpu_devices", num_ranks // job.num_processes)  # GPUs are what the launcher gave
        start_process(stuck_s=options.stuck_s, preemption_service=True)
        return data_mesh(options.devices)
    if options.simulate:
        num_simulated = options.devices or DEFAULT_SIMULATED_DEVICES
        simulate_devices(num_simulated)
        return data_mesh(num_simulated)
    return mesh_of_machine(options.devices, DEFAULT_SIMULATED_DEVICES)


def _make_strategy(options: TrainOptions) -> Strategy:
    compression = make_compression(options.compression)
    if options.bucket_mb is None:
        return make_strategy(options.strategy, compression=compression)
    factory = STRATEGIES.get(options.strategy)
    if factory is not None and "bucket_mb" not in inspect.signature(factory).parameters:
        raise ValueError(f"strategy {options.strategy!r} has no buckets: leave out bucket_mb (={options.bucket_mb:g})")
    return make_strategy(options.strategy, bucket_mb=options.bucket_mb, compression=compression)


def _make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    if options.optimizer == "adamw":
        return optax.adamw(options.learning_rate, weight_decay=0.01)
    return getattr(optax, options.optimizer)(options.learning_rate)
