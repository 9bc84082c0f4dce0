"""A training run of a language model, without a console.

``train`` reads text, starts the ranks, compiles the step, trains, and validates and saves in between. It reports
through two callbacks and returns a summary. A step trains on ``batch_size x context`` tokens, split evenly over the
ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ..communication.compression import make_compression
from ..instruments.schedule import gradient_collectives
from ..mesh import data_mesh, mesh_of_machine, simulate_devices
from ..models import build
from ..processes.job import find_job
from ..processes.start import local_rows, start_process
from ..registry import STRATEGIES, make_strategy
from ..strategy import Strategy
from ..training.agreement import check_alike
from ..training.allocator import keep_freed_memory
from ..training.clock import stopwatch
from ..training.data import Batch, Corpus
from ..training.train import Trainer
from ..training.validation import abstract
from .interrupts import noted_signals
from .train_options import DEFAULT_SIMULATED_DEVICES, TrainOptions
from .train_report import StepReport, TrainSummary
from .train_run import TrainRun

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
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    params_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    say(f"{options.model} ({num_params:,} parameters) on {describe_devices(mesh)}, {strategy.name}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")

    held_out = [local_rows(b) for b in corpus.validation_batches(options.batch_size, options.eval_batches)]
    with _open_checkpoints(options, say) as checkpoints:
        run = _Run(options, corpus, trainer, held_out, checkpoints, say, jax.process_index(), jax.process_count())
        if checkpoints is not None:
            checkpoints.reserve()
        run.params = abstract(params)
        if not run.resume():
            return None
        if run.state is None:
            run.state = trainer.init(params, seed=options.seed)
        del params  # the state holds copies

        batch = jax.eval_shape(lambda: corpus.batch(0, options.batch_size, seed=options.seed))  # of all ranks
        planned = trainer.planned(run.state, batch)
        program, compile_s = stopwatch(trainer.compile, run.state, batch)
        compiled = gradient_collectives(program)
        say(f"compiled in {compile_s:.1f} s")
        with noted_signals(is_in_job=run.num_processes > 1) as run.signals:
            run.take_steps(on_step)
    if run.error is not None:
        raise run.error
    return run.summary(
        num_params=num_params,
        params_bytes=params_bytes,
        devices=describe_devices(mesh),
        planned=planned,
        compiled=compiled,
        compile_s=compile_s,
        num_validation_bytes=run.num_processes * sum(batch["targets"].size for batch in held_out),
    )


class _Run(TrainRun):
    """A run with a trainer of this package."""

    params: Any = None  # their shapes
    state: Any = None

    def _take_step(self, batch: Batch) -> tuple[dict[str, Any], float]:
        (self.state, metrics), seconds = stopwatch(self.trainer.step, self.state, batch)
        if self.checkpoints is not None and self.checkpoints.has_failed and self.options.failed_save == "stop":
            if self.num_processes == 1:
                self.checkpoints.wait()  # raises
            signal.raise_signal(signal.SIGTERM)  # so that all processes get to the next save, which raises
        return metrics, seconds

    def _is_signalled(self) -> bool:
        if self.num_processes > 1:
            return multihost_utils.reached_preemption_sync_point(self.step)
        return bool(self.signals)

    def _check_replicas(self) -> None:
        self.trainer.check_replicas(self.state)

    def _restore(self) -> tuple[int, Any]:
        self.state, saved = self.checkpoints.restore(self.trainer, self.params)
        return int(self.state.step), saved

    def _wait_for_save(self) -> None:
        self.checkpoints.wait()

    def _save(self, position: Any, set_aside: bool) -> float:
        save = functools.partial(self.checkpoints.save, data_position=position, set_aside=set_aside)
        return stopwatch(save, self.trainer, self.state)[1]

    def _mean_loss(self) -> float | None:
        losses = [float(self.trainer.evaluate(self.state, batch)) for batch in self.held_out]
        return sum(losses) / len(losses) if losses else None


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
