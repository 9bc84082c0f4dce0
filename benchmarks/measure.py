"""What is measured, and the interleaving by which it is measured.

Variants take turns, one step each a round, and every round starts with another of them, so that a machine that drifts
moves all of them alike. A variant's exposed communication is the median, over rounds, of its step time minus the time
of the same step with its communication removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxddp.clock import Timings, stopwatch, summarize
from jaxddp.data import Batch
from torchref.launch import report

BASELINE = " without communication"  # what the label of a variant ends with whose communication is removed


class StrategySpec(NamedTuple):
    """A strategy as a row of a table: its name in both registries, and its bucket cap."""

    name: str
    bucket_mb: float | None = None

    @property
    def label(self) -> str:
        """For tables."""
        return self.name if self.bucket_mb is None else f"{self.name} {self.bucket_mb:g} MiB"


@dataclass(frozen=True)
class Setup:
    """One training run, repeated under several strategies side by side; plain data, sent to the rank processes.

    Attributes:
        model: A name that both packages' ``models.build`` know.
        strategies: What to compare.
        num_ranks: Ranks in each framework.
        batches: Global batches, one for each round; warm-up rounds come first and are not timed.
        num_warmup: Rounds that are not timed.
        learning_rate: Of AdamW, with weight decay 0.01.
        with_baselines: Whether each strategy also runs with its communication removed.
        with_peer: Whether the framework's own data parallelism runs as well.
        seed: Of the initial weights.
    """

    model: str
    strategies: tuple[StrategySpec, ...]
    num_ranks: int
    batches: tuple[Batch, ...]
    num_warmup: int = 2
    learning_rate: float = 1e-3
    with_baselines: bool = True
    with_peer: bool = False
    seed: int = 0

    @property
    def global_batch(self) -> int:
        """Examples of a batch over all ranks."""
        return len(next(iter(self.batches[0].values())))

    @property
    def num_timed(self) -> int:
        """Timed rounds."""
        return len(self.batches) - self.num_warmup


class StepMetrics(NamedTuple):
    """What a step says of itself."""

    loss: float
    grad_norm: float


class Variant(NamedTuple):
    """Something that takes a training step on the batch of a round, and returns when it is done."""

    label: str
    step: Callable[[int], StepMetrics]  # round -> metrics


@dataclass
class Measured:
    """What one variant did.

    Attributes:
        planned: ``(kind, bytes)`` of the collectives that were planned.
        found: The same of those in the compiled program, or of those issued where nothing is compiled.
        metrics: One for each round.
        reference: The same of single-process training.
        max_weight_difference: To single-process training, after the last round.
        seconds: One for each timed round.
        baseline_seconds: The same with the communication removed; empty if that was not run.
    """

    planned: list[tuple[str, int]]
    found: list[tuple[str, int]]
    metrics: list[StepMetrics]
    reference: list[StepMetrics]
    max_weight_difference: float
    seconds: list[float]
    baseline_seconds: list[float] = field(default_factory=list)

    @property
    def timings(self) -> Timings:
        """Of the step."""
        return summarize(self.seconds)

    @property
    def max_metric_difference(self) -> float:
        """Largest relative difference of any round's loss or gradient norm to single-process training's."""
        ours, theirs = np.asarray(self.metrics), np.asarray(self.reference)
        return float(np.max(np.abs(ours / theirs - 1)))

    @property
    def exposed_ms(self) -> float | None:
        """Median over rounds of step minus baseline; None without a baseline."""
        if not self.baseline_seconds:
            return None
        return float(np.median(np.subtract(self.seconds, self.baseline_seconds)) * 1e3)


@dataclass
class SideResult:
    """What one framework's process found.

    Attributes:
        num_ranks: Number of ranks.
        kind: What the ranks are, in a word.
        ranks: How the ranks run, in words.
        backend: What carries the collectives.
        device: What they run on.
        versions: Of the framework's packages.
        weights: Initial weights, by torch name.
        trained: Weights of single-process training after the last round, by torch name.
        measured: By label; ``"peer"`` is the framework's own data parallelism.
    """

    num_ranks: int
    kind: str
    ranks: str
    backend: str
    device: str
    versions: dict[str, str]
    weights: dict[str, np.ndarray]
    trained: dict[str, np.ndarray]
    measured: dict[str, Measured]


def interleave(
    variants: Sequence[Variant],
    num_rounds: int,
    num_warmup: int,
    *,
    barrier: Callable[[], None] = lambda: None,
    wait: Callable[[Any], Any] = lambda result: None,
) -> dict[str, tuple[list[StepMetrics], list[float]]]:
    """Runs every variant once a round, in turn.

    Args:
        variants: Each is stepped ``num_rounds`` times.
        num_rounds: Rounds, warm-up included.
        num_warmup: Rounds whose times are dropped.
        barrier: Called before each step, untimed, so that ranks start together.
        wait: Returns when the value that it is given is there.

    Returns:
        By label: all metrics, and the seconds of the timed rounds.
    """
    results: dict[str, tuple[list[StepMetrics], list[float]]] = {variant.label: ([], []) for variant in variants}
    for index in range(num_rounds):
        shift = index % len(variants)
        for variant in [*variants[shift:], *variants[:shift]]:
            barrier()
            step_metrics, seconds = stopwatch(variant.step, index, wait=wait)
            metrics, timed = results[variant.label]
            metrics.append(step_metrics)
            if index >= num_warmup:
                timed.append(seconds)
        report(("progress", index + 1, num_rounds))
    return results


def largest_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Largest absolute difference between two sets of weights of the same names."""
    return max(float(np.max(np.abs(ours[name].astype(np.float64) - theirs[name]))) for name in ours)
