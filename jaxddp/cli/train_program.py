"""The program of ``python -m jaxddp train``: a language model of bytes, trained data-parallel by ``take_steps``."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.experimental import multihost_utils

import jaxddp

from ..checkpoint.interop import from_numpy
from ..checkpoint.weights import load_weights
from ..models import build
from ..processes.job import find_job
from ..training.agreement import check_alike
from ..training.data import Batch, Corpus
from .train import DEFAULT_SIMULATED_DEVICES, StepReport, TrainOptions, take_steps


def train(options: TrainOptions, say: Callable[[str], None] = lambda line: None) -> list[StepReport]:
    """Trains a language model: ``say`` gets lines of text. What it returns and raises is ``take_steps``'."""
    jaxddp.keep_freed_memory()
    strategy = jaxddp.make_strategy(options.strategy, **options.strategy_options)
    corpus = Corpus(options.data, context=options.config.context)
    # The ranks of the job that this process is in, whose launcher gives GPUs, else those of this machine.
    job = find_job()
    num_processes = 1 if job is None else job.num_processes
    of_each = options.devices or (DEFAULT_SIMULATED_DEVICES if job is None else num_processes)
    with contextlib.suppress(RuntimeError):  # once JAX has started, the number of CPU devices cannot change
        jax.config.update("jax_num_cpu_devices", -(-of_each // num_processes))
    if job is not None:
        jaxddp.start_process(stuck_s=options.stuck_s, preemption_service=True)
    mesh = jaxddp.data_mesh(options.devices)
    check_alike(options.alike(corpus))

    loss_fn, params = build(options.model, seed=options.seed)
    if options.weights is not None:
        params = from_numpy(load_weights(options.weights), params)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    kind = mesh.devices.flat[0].device_kind
    kind += ", simulated" if kind == "cpu" and jax.process_count() == 1 else ""
    say(f"{options.model} ({num_params:,} parameters) on {mesh.size} x {kind}, {strategy.name}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")
    trainer = jaxddp.Trainer(
        loss_fn, make_optimizer(options), strategy, mesh,
        num_microbatches=options.microbatches, max_grad_norm=options.max_grad_norm,
        compute_dtype=options.compute_dtype, nonfinite="ignore" if options.nonfinite == "raise" else "skip",
    )  # fmt: skip
    training = _Training(trainer, params, options.seed)
    del params  # the state holds copies
    return take_steps(options, corpus, training, jaxddp.Checkpoints, say)


class _Training:
    """A trainer and its state, which each step replaces."""

    def __init__(self, trainer: jaxddp.Trainer, params: Any, seed: int) -> None:
        self._trainer, self._params, self._seed = trainer, params, seed
        self.state: Any = None  # a TrainState, once it is restored or made
        self.place: dict[str, int] = {"rank": jax.process_index(), "num_ranks": jax.process_count()}
        self.is_noted_by_jax = jax.process_count() > 1

    def start(self, batch: Batch) -> None:
        """Makes a state where none was restored, and compiles for a batch of all ranks."""
        if self.state is None:
            self.state = self._trainer.init(self._params, seed=self._seed)
        self._params = None  # the state holds copies
        shapes = jax.eval_shape(lambda: batch)
        self._planned = self._trainer.planned(self.state, shapes)
        self._program = self._trainer.compile(self.state, shapes)

    def collectives(self) -> tuple[Any, Any, str]:
        """(kind, bytes) of a step's, as planned and as found, and where."""
        return self._planned, jaxddp.gradient_collectives(self._program), "compiled"

    @property
    def num_steps(self) -> int:
        return 0 if self.state is None else int(self.state.step)

    def step(self, batch: Batch) -> dict[str, Any]:
        self.state, metrics = jax.block_until_ready(self._trainer.step(self.state, batch))
        return metrics

    def mean_loss(self, batches: Sequence[Batch]) -> float:
        losses = [float(self._trainer.evaluate(self.state, jaxddp.local_rows(batch))) for batch in batches]
        return sum(losses) / len(losses)

    def check_replicas(self) -> None:
        jaxddp.check_replicas(self._trainer, self.state)

    def is_signalled(self, signals: Sequence[int]) -> bool:
        if jax.process_count() > 1:  # all processes agree on a step
            return multihost_utils.reached_preemption_sync_point(self.num_steps)
        return bool(signals)

    def save(self, folder: jaxddp.Checkpoints, position: Any) -> None:
        folder.save(self._trainer, self.state, data_position=position)

    def restore(self, folder: jaxddp.Checkpoints) -> Any:
        self.state, position = folder.restore(self._trainer, self._params)
        return position


def make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """The optimizer by its name."""
    settings = {"weight_decay": 0.01} if options.optimizer == "adamw" else {}
    return getattr(optax, options.optimizer)(options.learning_rate, **settings)
