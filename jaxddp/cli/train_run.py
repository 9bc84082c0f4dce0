"""A training run of either package: its steps, with validations, checks of replicas and checkpoints in between.

No framework: ``train_loop.py`` of each package adds the trainer.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..processes.replicas import ReplicasDifferError
from ..training.clock import summarize
from ..training.data import Batch, Corpus
from .interrupts import Signalled
from .resume import check_position, position_of
from .train_options import TrainOptions
from .train_report import StepReport, TrainSummary, is_due


@dataclass
class TrainRun(abc.ABC):
    """A run. All processes of a job call the same in the same order.

    Attributes:
        trainer: Of the package, as are the held-out batches and the checkpoints, which are None if none are saved.
        say: Gets lines of text.
        process: This process, of the ``num_processes`` that read rows of a batch.
        signals: Numbers of the signals that came.
        step: Steps taken, those before a restored checkpoint included.
        error: What ended the run before its last step, if anything did.
    """

    options: TrainOptions
    corpus: Corpus
    trainer: Any
    held_out: list[Any]
    checkpoints: Any
    say: Callable[[str], None]
    process: int
    num_processes: int
    signals: list[int] = field(default_factory=list)
    step: int = 0
    error: Exception | None = None
    _first_step: int = 1
    _num_batches: int = 0
    _losses: list[float] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _skipped: list[bool] = field(default_factory=list)
    _validation_loss: float | None = None

    @abc.abstractmethod
    def _take_step(self, batch: Batch) -> tuple[Mapping[str, Any], float]:
        """Trains on this process's rows of a batch; gives the metrics, and the seconds."""

    @abc.abstractmethod
    def _is_signalled(self) -> bool:
        """Whether the run ends after this step: all processes agree on one."""

    @abc.abstractmethod
    def _check_replicas(self) -> None:
        """Raises ``ReplicasDifferError`` if ranks differ in what each has in full."""

    @abc.abstractmethod
    def _restore(self) -> tuple[int, Any]:
        """Restores the newest checkpoint that is not damaged; gives its step, and the position saved with it."""

    @abc.abstractmethod
    def _save(self, position: Any, set_aside: bool) -> float:
        """Saves the state; gives the seconds for which that held up training."""

    @abc.abstractmethod
    def _mean_loss(self) -> float | None:
        """The loss of what is held out; None if nothing is."""

    def _wait_for_save(self) -> None:  # noqa: B027  # only jaxddp saves in the background
        """Waits until what is being saved is written."""

    def resume(self) -> bool:
        """Goes on from the newest checkpoint, if there is one; False if no steps are left to take.

        Raises:
            ValueError: If the options do not resume, or do not go on with what was saved.
        """
        options = self.options
        taken = None if self.checkpoints is None else self.checkpoints.latest_step()
        if taken is None:
            if options.resume:
                self.say(f"no checkpoint in {options.checkpoint} yet: starting at step 0")
            return True
        if not options.resume:
            raise ValueError(
                f"checkpoint (={options.checkpoint!r}) holds step {taken}: resume, or choose another folder"
            )
        about = self.checkpoints.about()  # of the newest that is not damaged
        check_position(about["data_position"], position_of(options, self.corpus, 0), options, about["step"], self.say)
        self.step, saved = self._restore()
        if self.step != about["step"]:  # its tensors are damaged
            about = self.checkpoints.about(self.step)
        if self.step >= options.steps:
            self.say(f"complete: the checkpoint in {options.checkpoint} has taken {self.step} of {options.steps} steps")
            return False
        if saved["examples"] % options.batch_size:
            raise ValueError(
                f"batch_size (={options.batch_size}) must divide the examples taken (={saved['examples']})"
            )
        self._num_batches = saved["examples"] // options.batch_size
        self.say(f"resumed at step {self.step}, which {about['strategy']} saved on {about['num_ranks']} ranks")
        return True

    def take_steps(self, on_step: Callable[[StepReport], None]) -> None:
        """Trains up to the last step, or to one after which the run ends with an ``error``.

        Raises:
            OSError: If a checkpoint cannot be written.
            FloatingPointError: If a step or a validation met numbers that are not finite, and is not skipped.
            ReplicasDifferError: If ranks differ, and no checkpoint is restored.
        """
        options, checkpoints = self.options, self.checkpoints
        self._first_step = self.step + 1
        max_skips = options.max_skips if options.nonfinite == "skip" else 0  # here, so that the state can be saved
        saved_step = self.step or None  # of the newest checkpoint
        restored: int | None = None  # step of the checkpoint, if ranks came to differ after it
        is_owed = False  # whether a checkpoint is due once a step is not skipped
        while self.step < options.steps and self.error is None:
            self.step += 1
            batch = self.corpus.batch(
                self._num_batches, options.batch_size, seed=options.seed, rank=self.process,
                num_ranks=self.num_processes,
            )  # fmt: skip
            with self._set_aside_after_error(self.step - 1):
                metrics, seconds = self._take_step(batch)
            self._num_batches += 1
            self._losses.append(float(metrics["loss"]))
            self._seconds.append(seconds)
            self._skipped.append(bool(metrics.get("skipped", False)))
            num_skips = len([*itertools.takewhile(bool, reversed(self._skipped))])  # in a row
            gives_up = num_skips > max_skips
            is_last = gives_up or (self.step < options.steps and self._is_signalled())
            is_final = is_last or self.step == options.steps
            is_owed = is_owed or is_due(self.step, options.checkpoint_every, options.steps)
            is_saved = is_final or (is_owed and not num_skips)
            if is_saved or is_due(self.step, options.check_replicas_every, options.steps):
                try:
                    self._check_replicas()
                except ReplicasDifferError as error:
                    newest = None if checkpoints is None else checkpoints.latest_step()
                    if options.replicas == "stop" or newest in (None, restored):  # it is no accident a second time
                        raise
                    self.step, saved = self._restore()
                    self._num_batches, restored = saved["examples"] // options.batch_size, newest
                    for of_steps in (self._losses, self._seconds, self._skipped):
                        del of_steps[max(0, self.step - self._first_step + 1) :]
                    saved_step, is_owed = self.step, False
                    self.say(f"{error}; restored step {self.step}")
                    continue
            save_s = 0.0
            if checkpoints is not None and gives_up and saved_step == self.step - num_skips:
                self._set_aside(saved_step)
            elif checkpoints is not None and is_saved:
                goes_on = options.failed_save == "continue"
                with self._saying_if(goes_on):
                    self._wait_for_save()
                is_owed = False  # one that fails is not tried again before the next is due
                with self._saying_if(goes_on and not is_final):
                    save_s = self._save(position_of(options, self.corpus, self._num_batches), gives_up)
                    saved_step = self.step
                if gives_up:
                    aside = checkpoints.aside_path(self.step).name
                    self.say(f"the state before is kept as {aside} in {options.checkpoint}")
            is_validated = not is_last and is_due(self.step, options.eval_every, options.steps)
            self._validation_loss = loss = self._mean_loss() if is_validated else None
            tokens_per_s = options.batch_size * self.corpus.context / summarize(self._seconds[-20:]).median_ms * 1e3
            on_step(StepReport(self.step, self._losses[-1], loss, tokens_per_s, save_s))
            if loss is not None and not math.isfinite(loss):
                with self._set_aside_after_error(self.step):
                    raise FloatingPointError(f"validation loss (={loss}) after step {self.step} must be finite")
            if gives_up:
                self.error = FloatingPointError(
                    f"loss (={self._losses[-1]}) and gradient of step {self.step} must be finite: the updates of this"
                    f" step and the {max_skips} before it were skipped"
                )
            elif is_last:
                self.error = Signalled(self.signals[0] if self.signals else signal.SIGTERM)
        if checkpoints is not None:
            self._wait_for_save()
            self.say(f"checkpoints in {options.checkpoint}: steps {', '.join(map(str, checkpoints.steps()))}")

    def summary(self, **others: Any) -> TrainSummary:
        """The results of a run that has taken all its steps; ``others`` are what the package knows."""
        return TrainSummary(
            options=self.options,
            source=self.corpus.source,
            num_bytes=self.corpus.num_bytes,
            context=self.corpus.context,
            first_loss=self._losses[0],
            last_loss=self._losses[-1],
            validation_loss=self._validation_loss,
            step_timings=summarize(self._seconds),
            first_step=self._first_step,
            num_skipped=sum(self._skipped),
            **others,
        )

    @contextlib.contextmanager
    def _set_aside_after_error(self, step: int) -> Iterator[None]:
        """After numbers that are not finite, sets the checkpoint aside that holds the state they came from."""
        try:
            yield
        except FloatingPointError:
            self._set_aside(step)
            raise

    def _set_aside(self, step: int) -> None:
        """Renames the checkpoint of a state after which nothing was finite: a resumed run takes the one before."""
        if self.checkpoints is not None and (name := self.checkpoints.set_aside(step)):
            self.say(f"no step from the checkpoint of step {step} is finite: renamed it to {name}")

    @contextlib.contextmanager
    def _saying_if(self, goes_on: bool) -> Iterator[None]:
        """Says why a checkpoint was not written, in place of raising."""
        try:
            yield
        except OSError as error:
            if not goes_on:
                raise
            self.say(f"{error}; going on")
