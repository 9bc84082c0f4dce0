"""Every collective by size, number of ranks and backend: how long a call takes, and what a rank sends meanwhile.

    python -m benchmarks collectives --ranks 2 --sizes-mb 1 10 100

A backend with a number of ranks is a part of the run, and the frameworks run one after the other: their ratio is of
two parts. Simulated devices copy within one memory and send nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxddp.clock import summarize
from torchref.launch import RankError

from ..console import progress_of
from ..cores import num_cores
from ..free_memory import free_bytes
from ..options import Options
from ..ranks import THREADS, Ranks, ranks_of_machine
from ..run import FAILED, NOT_RUN, Run, holds
from . import jax_side, torch_side
from .cases import NAMES, QUICK_NAMES, check, rates
from .fit import fit_rows
from .forecast import START_S, Forecast, assumed_network, duration, forecast_s
from .picture import draw
from .sizes import asked_sizes, check_fit, fitting, in_words, launches
from .table import notes, print_tables, write_tables
from .turns import MIN_ROUNDS, Batch, Job, Side

RANKS = (2, 4, 6)  # as the source
BUDGET_S, QUICK_BUDGET_S = 3.0, 1.0  # of timed rounds, for each size
MAX_FAILED = 3  # sizes of a part that its processes did not survive
BACKENDS = (
    ("jaxddp", "simulated"),
    ("jaxddp", "processes"),
    ("torchref", "processes"),
    ("jaxddp", "gpus"),
    ("torchref", "gpus"),
)


class Part(NamedTuple):
    """A backend with a number of ranks.

    Attributes:
        framework: ``"jaxddp"`` or ``"torchref"``.
        ranks: How they run.
        why_not: Why it cannot be measured here; empty if it can.
    """

    framework: str
    ranks: Ranks
    why_not: str = ""

    @property
    def backend(self) -> str:
        """What carries the collectives."""
        return self.ranks.backend[self.framework]

    @property
    def key(self) -> str:
        """For tables."""
        return f"{self.backend}, {self.ranks.num} ranks"


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        parts: Backends by number of ranks.
        names: The collectives.
        sizes: Bytes that were asked for, ascending.
        num_rounds: Timed rounds of each size; None for as many as there is time for.
        budget_s: The time that there is for a size.
    """

    parts: tuple[Part, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    num_rounds: int | None
    budget_s: float


def describe(options: Options) -> tuple[Setup, str]:
    """Describes what is measured.

    Args:
        options: Ranks (2, 4 and 6; with GPUs no more than there are), what they are (all that there is), sizes (1 KiB
            to 1 GiB by powers of 4, as far as they fit into memory), rounds of each (as many as there is time for, at
            least 5), and whether the short form will do: four collectives up to 16 MiB on 2 ranks.

    Returns:
        The setup, and its description in a line, with the time that it will take.

    Raises:
        ValueError: If there are too few ranks or rounds, no such GPUs, or sizes asked for by hand that do not fit.
    """
    if options.steps is not None and options.steps < MIN_ROUNDS:
        raise ValueError(f"steps (={options.steps}) must be at least {MIN_ROUNDS} rounds, or the spread means nothing")
    parts = _parts(options)
    names = QUICK_NAMES if options.quick else NAMES
    sizes = asked_sizes(options.sizes_mb, options.quick)
    budget_s = QUICK_BUDGET_S if options.quick else BUDGET_S
    setup = Setup(parts, names, sizes, options.steps, budget_s)
    there = [part for part in parts if not part.why_not]
    if options.sizes_mb:
        for part in there:
            check_fit(names, sizes, part.ranks, free_bytes(part.ranks.kind))
    where = {"gpus": "GPUs", "lab": "the lab's links"}
    assumed = {where.get(part.ranks.kind, "CPUs"): assumed_network(part.ranks) for part in there}
    speeds = " and ".join(f"{network.gb_per_s:.3g} GB/s on {what}" for what, network in assumed.items())
    described = (
        f"{len(names)} collectives of {in_words(sizes[0])} to {in_words(sizes[-1])}:"
        f" {'; '.join(part.key for part in there)}; about {duration(sum(_forecast(setup, there).values()))} if a rank"
        f" sends {speeds}, corrected as it goes"
    )
    return setup, described


def run(this: Run, setup: Setup) -> bool:
    """Measures every part, prints the tables and fills the folder.

    Args:
        this: The folder, console and rows of this run.
        setup: What to measure.

    Returns:
        Whether every result is right, and every program issues what it should.
    """
    forecast = Forecast(_forecast(setup, [part for part in setup.parts if not part.why_not]))
    for part in setup.parts:
        this.part(part.key, lambda part=part: _measure(this, setup, part, forecast))  # type: ignore[misc]
        forecast.skip(part.key)
    said = notes(this.rows)
    print_tables(this.console, this.rows, said)
    write_tables(this.folder, this.rows, said)
    written = ["table.md", "metrics.jsonl", *draw(this.rows, this.folder)]
    this.console.print(f"\nwritten to {this.folder}: {', '.join(written)}", soft_wrap=True)
    return holds(this.rows)


def _parts(options: Options) -> tuple[Part, ...]:
    import torch

    num_gpus = torch.cuda.device_count()
    if options.ranks == 1:
        raise ValueError("ranks (=1) must be at least 2: one rank has no other to communicate with")
    if options.on == "gpus":
        ranks_of_machine(2, "gpus")  # raises if there are none
        if options.ranks is not None and options.ranks > num_gpus:
            raise ValueError(f"ranks (={options.ranks}) must be at most the number of GPUs (={num_gpus})")
    parts: dict[Part, None] = {}
    backends = _of_kind(options.on) if options.on else BACKENDS
    for num_ranks in (options.ranks,) if options.ranks else (2,) if options.quick else RANKS:
        for framework, kind in backends:
            parts[_part(framework, kind, num_ranks, num_gpus)] = None
    return tuple(parts)


def _of_kind(kind: str) -> tuple[tuple[str, str], ...]:
    # torch's ranks are always processes: these are the counterpart of simulated devices.
    of_torch = "processes" if kind == "simulated" else kind
    return ("jaxddp", kind), ("torchref", of_torch)


def _part(framework: str, kind: str, num_ranks: int, num_gpus: int) -> Part:
    if kind == "gpus" and num_gpus < 2:
        return Part(framework, Ranks(num_ranks, kind), "one GPU, and ranks need one each" if num_gpus else "no GPU")
    return Part(framework, ranks_of_machine(num_ranks, kind))


def _forecast(setup: Setup, parts: Sequence[Part]) -> dict[tuple[str, Batch], float]:
    seconds = {}
    for part in parts:
        batches, _ = fitting(setup.names, setup.sizes, part.ranks, free_bytes(part.ranks.kind))
        for launch in launches(batches):
            for batch in launch:
                start_s = START_S if batch is launch[0] else 0.0
                seconds[part.key, batch] = start_s + forecast_s(batch, part.ranks, setup.num_rounds, setup.budget_s)
    return seconds


def _measure(this: Run, setup: Setup, part: Part, forecast: Forecast) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"framework": part.framework, "backend": part.backend, "kind": part.ranks.kind}
    threads = THREADS if part.framework == "torchref" else num_cores(part.ranks.kind, part.ranks.num) or os.cpu_count()
    common |= {"num_ranks": part.ranks.num, "threads": threads, "dtype": "float32"}
    if part.why_not:
        return [common | {"check": f"{NOT_RUN}{part.why_not}"}]
    batches, left_out = fitting(setup.names, setup.sizes, part.ranks, free_bytes(part.ranks.kind))
    rows = [
        common | {"collective": name, "asked_bytes": asked, "check": f"{NOT_RUN}{why}"} for name, asked, why in left_out
    ]
    if not batches:
        return rows
    sides, failed = _sides(this, setup, part, batches, forecast)
    for batch, why in failed.items():
        row = common | {"asked_bytes": batch.asked_bytes, "check": f"{FAILED}{in_words(batch.asked_bytes)}: {why}"}
        rows += [row | {"collective": name} for name in batch.names]
    common |= {"device": sides[0].device, "versions": sides[0].versions}
    rows += [common | row for row in rows_of(sides, part.ranks.num)]
    return rows + [common | row for row in fit_rows(rows)]


def _sides(
    this: Run, setup: Setup, part: Part, batches: Sequence[Batch], forecast: Forecast
) -> tuple[list[Side], dict[Batch, str]]:
    """Runs the ranks; a batch that their processes do not survive is left out, and the others are run again.

    Args:
        this: The console.
        setup: What is measured.
        part: By whom.
        batches: At least one.
        forecast: To be kept up to date.

    Returns:
        What the processes found; and of the batches that failed, why. After ``MAX_FAILED`` sizes, or if processes end
        before they begin with one, what is left counts as failed.

    Raises:
        RankError: If nothing was found.
    """
    run_ranks = part.ranks.run_jax if part.framework == "jaxddp" else part.ranks.run_torch
    side = jax_side if part.framework == "jaxddp" else torch_side
    failed: dict[Batch, str] = {}
    found: list[list[Side]] = []
    last: RankError | None = None
    to_do = launches(batches)
    while to_do:
        job = Job(to_do.pop(0), setup.num_rounds, setup.budget_s)
        with progress_of(this.console, part.key) as show:
            on_message = forecast.follow(part.key, show)
            try:
                found.append(run_ranks(side.run, job, on_message=on_message))
            except RankError as error:
                last, ended = error, on_message.under_way
                why = this.keep_error(f"{part.key}, {_in_words(ended or job.batches[0])}", error)
                to_do = [left for left in (tuple(one for one in job.batches if one != ended), *to_do) if left]
                failed |= {} if ended is None else {ended: why}
                if ended is None or len({batch.asked_bytes for batch in failed}) == MAX_FAILED:
                    failed |= dict.fromkeys([one for left in to_do for one in left], f"not tried after: {why}")
                    to_do = []
            finally:
                on_message.close()
    if last is not None and not found:
        raise last
    joined = [
        replace(of_rank[0], timed=[timed for each in of_rank for timed in each.timed])
        for of_rank in zip(*found, strict=True)
    ]
    return joined, failed


def _in_words(batch: Batch) -> str:
    return f"{in_words(batch.asked_bytes)} of {', '.join(batch.names)}"


def rows_of(sides: Sequence[Side], num_ranks: int) -> list[dict[str, Any]]:
    """Joins what the processes of a backend found: a call takes as long as on its slowest rank.

    Args:
        sides: One for each process.
        num_ranks: Of the backend.

    Returns:
        A row for each collective and size, ascending.
    """
    rows = []
    for of_ranks in zip(*(side.timed for side in sides), strict=True):
        first = of_ranks[0]
        row: dict[str, Any] = {"collective": first.name, "asked_bytes": first.asked_bytes}
        if first.failed:
            rows.append(row | {"check": f"{FAILED}{first.failed}"})
            continue
        seconds = [max(times) for times in zip(*(one.seconds for one in of_ranks), strict=True)]
        timings = summarize(seconds)
        algbw, busbw = rates(first.name, first.size_bytes, timings.median_ms * 1e-3, num_ranks)
        row |= {"size_bytes": first.size_bytes, **timings._asdict(), "num_rounds": len(seconds)}
        row |= {"algbw_gb_per_s": algbw, "busbw_gb_per_s": busbw, "kernel": first.kernel}
        row |= {"planned": first.planned, "compiled": first.found}
        row["check"] = check(first.planned, first.found, sum(one.wrong for one in of_ranks))
        row["rounds_ms"] = [float(f"{each * 1e3:.5g}") for each in seconds]
        rows.append(row)
    return sorted(rows, key=lambda row: (NAMES.index(row["collective"]), row["asked_bytes"]))
