"""What is measured: a training run under several strategies, and what each of them did.

A variant's exposed communication is the median, over rounds, of its step time minus the time of the same step with its
communication removed. Where ranks are processes, a step takes as long as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxddp.training.clock import Timings, summarize
from jaxddp.training.data import Batch

from ..harness.cores import num_cores
from ..harness.ranks import THREADS, Ranks

# What each framework does by itself.
PEERS = {
    "jaxddp": ("jit",),
    "torchref": ("DistributedDataParallel", "torch.compile", "ZeroRedundancyOptimizer", "fully_shard"),
}
FORWARD_BACKWARD = "forward and backward"
AT_ONCE = "forward and backward beside all-reduces"
NUM_PROBED = 4  # all-reduces in a row that a probe times at once


class StrategySpec(NamedTuple):
    """A strategy as a row of a table: its name in both registries or among ``PEERS``, and its bucket cap."""

    name: str
    bucket_mb: float | None = None

    @property
    def label(self) -> str:
        """For tables."""
        return self.name if self.bucket_mb is None else f"{self.name} {self.bucket_mb:g} MiB"

    @property
    def without_communication(self) -> tuple[str, StrategySpec]:
        """Label and strategy of the same step without communication: jit's is ours, which computes the same."""
        spec = StrategySpec("naive") if self.name == "jit" else self
        return f"{spec.label} without communication", spec


@dataclass(frozen=True)
class TrainingSetup:
    """One training run, repeated under several strategies side by side; plain data, sent to the rank processes.

    Attributes:
        model: A name that both packages' ``models.build`` know.
        batches: Global batches, one for each round; warm-up rounds come first and are not timed.
        tolerance: How far weights may be from single-process training; None to go by losses and gradient norms alone.
        must_learn: Whether the loss has to fall; random tokens teach nothing.
        learning_rate: Of AdamW, with weight decay 0.01.
        with_baselines: Whether each strategy also runs with its communication removed.
        num_in_a_row: Steps between two synchronisations that are timed as well, after all rounds; 0 for none.
        num_on_device: Steps that are timed on the device as well, after those; 0 for none, as on CPUs.
        probe_bytes: Sizes of all-reduces that are timed as well; if there are any, so are forward and backward alone,
            and beside all-reduces of the last but one.
        with_schedules: Whether compiled programs are read.
        takes_turns: Whether the frameworks run at one time, and take turns round by round, instead of one after the
            other; ranks of a job never do.
        turns: Where they ask for their turns; see ``harness/turns.py``.
    """

    model: str
    strategies: tuple[StrategySpec, ...]
    ranks: Ranks
    batches: tuple[Batch, ...]
    num_warmup: int = 2
    tolerance: float | None = None
    must_learn: bool = False
    dtype: str = "f32"
    learning_rate: float = 1e-3
    with_baselines: bool = True
    num_in_a_row: int = 0
    num_on_device: int = 0
    probe_bytes: tuple[int, ...] = ()
    with_schedules: bool = False
    with_traces: bool = False
    takes_turns: bool = False
    turns: str = ""
    seed: int = 0

    def of(self, framework: str) -> tuple[StrategySpec, ...]:
        """What runs in a framework."""
        others = {name for key, names in PEERS.items() if key != framework for name in names}
        return tuple(spec for spec in self.strategies if spec.name not in others)

    @property
    def global_batch(self) -> int:
        """Examples of a batch over all ranks."""
        return len(next(iter(self.batches[0].values())))

    @property
    def num_timed(self) -> int:
        """Timed rounds."""
        return len(self.batches) - self.num_warmup


class StepMetrics(NamedTuple):
    """Metrics of a step."""

    loss: float
    grad_norm: float


@dataclass
class Measured:
    """What one variant did.

    Attributes:
        planned: ``(kind, bytes)`` of the collectives that were planned; None of a peer, which plans for itself.
        found: The same of those in the compiled program, or of those issued where nothing is compiled; None if they
            cannot be seen.
        metrics: One for each round.
        reference: The same of single-process training.
        max_weight_difference: To single-process training, after the last round.
        seconds: One for each timed round.
        baseline_seconds: The same with the communication removed; empty if that was not run.
        buckets: Names and bytes of the tensors of each bucket, in launch order.
        in_a_row_seconds: Of a step among several between two synchronisations; empty if that was not run.
        device_seconds: Of a step on the device; empty if that was not run.
        no_device_seconds: Why it was not, though it was asked for.
        schedule: What the step was compiled to, a ``jaxddp.instruments.schedule.Schedule``, if that was asked for.
    """

    planned: list[tuple[str, int]] | None
    found: list[tuple[str, int]] | None
    metrics: list[StepMetrics]
    reference: list[StepMetrics]
    max_weight_difference: float
    seconds: list[float]
    baseline_seconds: list[float] = field(default_factory=list)
    buckets: list[list[tuple[str, int]]] = field(default_factory=list)
    schedule: Any = None
    in_a_row_seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)
    no_device_seconds: str = ""

    @property
    def timings(self) -> Timings:
        """Of the step."""
        return summarize(self.seconds)

    @property
    def max_metric_difference(self) -> float:
        """Largest relative difference of any round's loss or gradient norm to single-process training's."""
        return float(np.max([_distance(*pair) for pair in zip(self.metrics, self.reference, strict=True)]))

    @property
    def exposed(self) -> Timings | None:
        """Of step minus baseline, round by round; None without a baseline."""
        if not self.baseline_seconds:
            return None
        return summarize(np.subtract(self.seconds, self.baseline_seconds).tolist())


@dataclass
class SideResult:
    """What one framework's processes found.

    Attributes:
        kind: What the ranks are, in a word; ``ranks`` says how they run.
        weights: Initial weights, by torch name.
        trained: Weights of single-process training after the last round, by torch name.
        failed: Why others were not measured, by label.
        in_turns: Whether the other framework was measured between its rounds.
        probes: Seconds of the timed rounds, by ``FORWARD_BACKWARD``, ``AT_ONCE`` and ``all_reduce_label``.
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
    failed: dict[str, str] = field(default_factory=dict)
    probes: dict[str, list[float]] = field(default_factory=dict)
    in_turns: bool = False


def ranks_in_words(ranks: Ranks, framework: str) -> tuple[str, str]:
    """Describes how the ranks of a framework run: in a word, and in a few."""
    each = f", {ranks.num_on_host} on each of {len(ranks.per_host)} hosts" if ranks.per_host else ""
    if ranks.is_process_per_host and framework == "jaxddp":
        devices = "GPUs" if ranks.kind == "gpus" else "CPU devices"
        words = f"in {len(ranks.per_host)} process{'es' * (len(ranks.per_host) > 1)}"
        return words, f"{ranks.num} {devices} {words}{each}"
    if ranks.kind == "gpus":
        how = "GPUs in one process" if framework == "jaxddp" and not each else "processes with a GPU each"
        return "GPUs", f"{ranks.num} {how}{each}"
    count = num_cores(ranks.kind, ranks.num)
    if ranks.kind == "simulated" and framework == "jaxddp":
        on = f", on {count} core(s)" if count else ""
        return "simulated", f"{ranks.num} simulated CPU devices in one process{on}"
    where = ", each on a host of its own" if ranks.kind == "lab" else ""
    device = "one CPU device on one core" if count else "one CPU device"
    threads = f"{THREADS} thread(s)" if framework == "torchref" else device
    return "hosts" if where else "processes", f"{ranks.num} processes of {threads}{where}{each}"


def all_reduce_label(num_bytes: int) -> str:
    """The probe of ``NUM_PROBED`` all-reduces of so many bytes each."""
    return f"all-reduce {num_bytes}"


def merge_ranks(sides: Sequence[SideResult]) -> SideResult:
    """Joins what the processes found, rank 0 first: each step as slow and as wrong as on its worst rank."""
    first = sides[0]
    measured = {label: _merge([side.measured[label] for side in sides]) for label in first.measured}
    probes = {label: _slowest([side.probes[label] for side in sides]) for label in first.probes}
    return replace(first, measured=measured, probes=probes)


def _merge(of_ranks: Sequence[Measured]) -> Measured:
    first = of_ranks[0]
    metrics = [
        max(of_round, key=lambda one, expected=expected: _distance(one, expected))  # type: ignore[misc]
        for *of_round, expected in zip(*(one.metrics for one in of_ranks), first.reference, strict=True)
    ]
    return replace(
        first,
        metrics=metrics,
        max_weight_difference=float(np.max([one.max_weight_difference for one in of_ranks])),  # NaN is worst
        seconds=_slowest([one.seconds for one in of_ranks]),
        baseline_seconds=_slowest([one.baseline_seconds for one in of_ranks]),
        in_a_row_seconds=_slowest([one.in_a_row_seconds for one in of_ranks]),
        device_seconds=_slowest([one.device_seconds for one in of_ranks]),
    )


def _slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(times) for times in zip(*of_ranks, strict=True)]


def _distance(ours: StepMetrics, theirs: StepMetrics) -> float:
    difference = float(np.max(np.abs(np.divide(ours, theirs) - 1)))
    return float("inf") if np.isnan(difference) else difference


def largest_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Largest absolute difference between two sets of weights of the same names."""
    return max(float(np.max(np.abs(ours[name].astype(np.float64) - theirs[name]))) for name in ours)
