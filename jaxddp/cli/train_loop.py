"""The loop of ``python -m jaxddp train`` and of its twin: steps, and what comes between them.

No framework is imported.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..training.clock import stopwatch
from ..training.data import Corpus
from .interrupts import Signalled, noted_signals
from .train_options import (
    CHECK_REPLICAS_EVERY,
    MAX_SKIPS,
    Progress,
    StepReport,
    TrainOptions,
    position_of,
    skipped_too_often,
)


class Training(NamedTuple):
    """What the loop calls; all processes of a job call the same.

    Attributes:
        step: Number of a batch ``->`` the metrics of a step on it, and its seconds.
        is_signalled: ``(step, this process's signals) ->`` whether one ends the run, as all processes agree.
        check_replicas: Compares what each rank has in full.
        validate: Gives the loss of what is held out, None if nothing is.
        save: ``(step, data_position, set_aside)``; None if nothing is saved.
        is_in_job: Whether a launcher of several processes gets the signals too.
    """

    step: Callable[[int], tuple[Mapping[str, Any], float]]
    is_signalled: Callable[[int, Sequence[int]], bool]
    check_replicas: Callable[[], None]
    validate: Callable[[], float | None]
    save: Callable[..., None] | None
    is_in_job: bool = False


def take_steps(
    options: TrainOptions,
    corpus: Corpus,
    training: Training,
    step: int,
    num_batches: int,
    say: Callable[[str], None],
    on_step: Callable[[StepReport], None],
) -> tuple[Progress, Exception | None]:
    """Trains from a step up to the last one; gives the error that has ended it, once the state is saved."""
    saved_step, num_skips = step, 0  # in a row
    max_skips = MAX_SKIPS if options.nonfinite == "skip" else 0
    error: Exception | None = None
    progress = Progress(options, corpus.context, step + 1)
    with noted_signals(is_in_job=training.is_in_job) as signals, progress.counted_at_ctrl_c():
        while step < options.steps and error is None:
            metrics, seconds = training.step(num_batches)
            step, num_batches, loss = step + 1, num_batches + 1, float(metrics["loss"])
            num_skips = num_skips + 1 if metrics.get("skipped") else 0
            gives_up = num_skips > max_skips
            if gives_up:
                error = skipped_too_often(loss, step, num_skips)
            elif step < options.steps and training.is_signalled(step, signals):
                error = Signalled(signals[0] if signals else signal.SIGTERM, f"after {step} of {options.steps} steps")
            is_last, is_due = error is not None or step == options.steps, options.is_due(step)
            if is_last or is_due or step % CHECK_REPLICAS_EVERY == 0:
                training.check_replicas()
            validation_loss = training.validate() if is_due and error is None else None

            save_s = 0.0
            if gives_up:  # the state before is kept, unless it is that of the newest checkpoint
                is_saved = saved_step != step - num_skips
            else:
                is_saved = is_last or (is_due and num_skips == 0)
            if training.save is not None and is_saved:
                position = position_of(options, corpus, num_batches)
                save = partial(training.save, step, data_position=position, set_aside=gives_up)
                save_s, saved_step = stopwatch(save, wait=lambda _: None)[1], step
                if gives_up:
                    say(f"the state before is kept as {step}.nonfinite in {options.checkpoint}")
            report = StepReport(step, loss, validation_loss, save_s)
            if line := progress.add(report, seconds, num_skips > 0):
                say(line)
            on_step(report)
    return progress, error
