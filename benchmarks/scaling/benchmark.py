"""Scaling efficiency, measured on this machine's ranks and simulated beyond.

    strong   the global batch is fixed:     efficiency = T(first) first / (T(n) n)
    weak     the batch per rank is fixed:   efficiency = T(first) / T(n)

Numbers of ranks run one after the other in processes of their own, so medians are compared, not rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..harness.job_hosts import open_hosts
from ..harness.options import Options
from ..harness.ranks import chosen_ranks, ranks_of_machine
from ..harness.ratios import compare
from ..harness.run import Run
from ..report.section import show
from ..strategies.benchmark import check_batch_size, check_memory, default_model, make_setup, spec_of
from ..training.frameworks import FRAMEWORKS, measure_both
from ..training.measure import PEERS, SideResult, TrainingSetup
from ..training.steps import step_rows
from .section import section
from .simulation import Beyond, beyond_of, simulate_beyond

NUM_RANKS, QUICK_RANKS, BATCH_SIZE, NUM_STEPS, NUM_QUICK = 4, 2, 8, 12, 4
SIMULATED = "simulated"


@dataclass(frozen=True)
class Point:
    """A number of ranks and a batch, for one scaling mode or both."""

    setup: TrainingSetup
    modes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name."""
        return f"{self.setup.ranks.num} ranks, batch {self.setup.global_batch}"


@dataclass(frozen=True)
class ScalingJob:
    """What is measured, by growing number of ranks, and what is simulated."""

    points: tuple[Point, ...]
    beyond: Beyond


def describe(options: Options) -> tuple[ScalingJob, str]:
    """Describes the points.

    Defaults (short form): up to 4 ranks (2), 12 rounds (4), a global batch of 8 for strong scaling, the model byte
    (byte_shallow), the strategy bucketed, simulated up to ``h100:512`` (``h100:64``).

    Raises:
        ValueError: If a name is unknown, the batch cannot be split over the most ranks, or memory is too small.
    """
    batch_size, default = options.batch_size or BATCH_SIZE, QUICK_RANKS if options.quick else NUM_RANKS
    most = chosen_ranks(options.ranks, default, options.on, batch_size=batch_size).num
    check_batch_size(batch_size, most)
    model, names = options.model or default_model(options), options.strategies or ("bucketed",)
    counts = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    if options.on == "job":
        num_hosts = open_hosts().num_hosts
        counts = [count for count in counts if count < num_hosts or count % num_hosts == 0]
    modes: dict[tuple[int, int], list[str]] = {}
    for count in counts:
        modes.setdefault((count, batch_size), []).append("strong")
        modes.setdefault((count, batch_size // most * count), []).append("weak")
    num_steps = options.steps or (NUM_QUICK if options.quick else NUM_STEPS)
    points = []
    for (count, size), its_modes in modes.items():
        ranks, dtype = ranks_of_machine(count, options.on), options.dtype or "f32"
        setup, _ = make_setup(model, ranks, num_steps, size, data=options.data, dtype=dtype)
        specs = tuple(spec_of(name, model) for name in names)
        points.append(Point(replace(setup, strategies=specs, with_baselines=False), tuple(its_modes)))
        check_memory(points[-1].setup)
    beyond = beyond_of(options, [spec for spec in specs if spec.name not in sum(PEERS.values(), ())])
    described = (
        f"{model}, {', '.join(names)}, {', '.join(map(str, counts))} ranks: strong scaling at a batch of {batch_size},"
        f" weak at {batch_size // most} a rank; simulated: {beyond.in_words}"
    )
    return ScalingJob(tuple(points), beyond), described


def run(this: Run, job: ScalingJob) -> bool:
    """Measures and simulates, prints the table and writes the folder."""
    for point in job.points:
        if len(job.points) > 1:
            this.console.print(f"\n{point.name}: {' and '.join(point.modes)} scaling")
        rows_of = partial(scaling_rows, point.modes, this.rows)
        measure_both(this, dict.fromkeys(FRAMEWORKS, point.setup), rows_of, name=point.name)
    this.part(SIMULATED, lambda: with_efficiency(list(simulate_beyond(job.beyond, this.console)), []))
    return show(this, section(this.rows))


def scaling_rows(
    modes: Sequence[str], earlier: Sequence[Mapping[str, Any]], framework: str, setup: TrainingSetup, side: SideResult
) -> list[dict[str, Any]]:
    """Makes rows of one framework's measurements, one for each mode that they serve."""
    found = step_rows(framework, setup, side)
    return list(with_efficiency([row | {"mode": mode, "how": "measured"} for mode in modes for row in found], earlier))


def with_efficiency(
    rows: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Adds the efficiency relative to the fewest ranks, and for measured rows its 95 % interval."""
    keys = ("framework", "strategy", "bucket_mb", "mode", "how")
    for row in rows:
        alike = [one for one in (*earlier, *rows) if all(one.get(key) == row.get(key) for key in keys)]
        sound = [one for one in alike if one["check"] == "ok" and "median_ms" in one]
        first = min(sound, key=lambda one: one["num_ranks"], default=None)
        if first is None or "median_ms" not in row or first["num_ranks"] > row["num_ranks"]:
            yield dict(row)
            continue
        share = first["num_ranks"] / row["num_ranks"] if row["mode"] == "strong" else 1.0
        fields: dict[str, Any] = {"efficiency": first["median_ms"] / row["median_ms"] * share}
        if "rounds_ms" in row and first["num_ranks"] < row["num_ranks"]:
            ratio = compare("", first["rounds_ms"], row["rounds_ms"], 1.0, paired=False)
            fields |= {"efficiency_low": ratio.low * share, "efficiency_high": ratio.high * share}
        yield dict(row) | fields
