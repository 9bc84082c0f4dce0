"""What a training run reports, after a step and at its end; ``torchref`` reports the same. No framework is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..training.clock import Timings
from .train_options import TrainOptions


class StepReport(NamedTuple):
    """What is reported after a step."""

    step: int  # steps taken, from 1
    loss: float  # nats per byte, of the global batch, before the update
    validation_loss: float | None  # nats per byte, after the update; None if there is no validation after this step
    tokens_per_s: float  # at the median of the last steps
    save_s: float = 0.0  # for which a checkpoint after this step held up training


@dataclass(frozen=True)
class TrainSummary:
    """The results of a run; losses are in nats per byte."""

    options: TrainOptions
    num_params: int
    params_bytes: int
    source: str
    num_bytes: int
    devices: str
    context: int
    planned: list[tuple[str, int]]
    compiled: list[tuple[str, int]]  # in torchref, which compiles nothing, the collectives of the first step
    compile_s: float | None
    first_loss: float
    last_loss: float
    validation_loss: float | None
    num_validation_bytes: int
    step_timings: Timings
    first_step: int = 1  # of this run, which may continue an earlier one
    num_skipped: int = 0  # steps whose update was skipped

    @property
    def as_planned(self) -> bool:
        """Whether a step has exactly the planned collectives."""
        return sorted(self.planned) == sorted(self.compiled)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch per median step time, without compilation and validation."""
        return self.options.batch_size * self.context / self.step_timings.median_ms * 1e3


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done every so many steps, 0 for never, and after the last is done after this step."""
    return step == last or (every > 0 and step % every == 0)
