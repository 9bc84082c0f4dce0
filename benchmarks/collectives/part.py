"""A part of the run, one backend with a number of ranks: what is missing of it, measuring that, and its rows.

Each size is written as soon as it is measured, so it survives a later failure, and a resumed run measures only the
missing sizes. If the processes do not survive a batch, it is left out and new processes run the remaining batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxddp.training.clock import summarize
from torchref.launch import RankError

from ..harness.console import progress_of
from ..harness.cores import num_cores
from ..harness.free_memory import free_bytes
from ..harness.ranks import THREADS, Ranks
from ..harness.run import FAILED, NOT_RUN, Run, is_failed
from ..harness.values import Row, size
from . import jax_side, torch_side
from .cases import NAMES, check, rates
from .fit import fit_rows
from .forecast import Forecast
from .interleaving import Batch, Found, RanksJob, Side, Timed
from .sizes import fitting, launches

IN_A_ROW = 20  # as nccl-tests
MAX_FAILED = 3  # sizes that the processes did not survive, after which a part is given up


class BackendPart(NamedTuple):
    """A backend of a framework with a number of ranks; ``why_not`` is empty if it can be measured here."""

    framework: str
    ranks: Ranks
    why_not: str = ""

    @property
    def backend(self) -> str:
        """The library that carries the collectives."""
        return self.ranks.backend[self.framework]

    @property
    def key(self) -> str:
        """Its name in tables."""
        return f"{self.backend}, {self.ranks.num} ranks"


@dataclass(frozen=True)
class CollectivesSetup:
    """What is measured.

    Attributes:
        parts: Backends by number of ranks.
        sizes: Requested bytes, ascending.
        num_rounds: Timed rounds per size; None for as many as fit into ``budget_s`` seconds.
        in_a_row: Calls of small buffers that are also timed between two synchronisations; None for 20 on GPUs, and none
            elsewhere.
        nccl_tests: Files of what nccl-tests printed.
    """

    parts: tuple[BackendPart, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    num_rounds: int | None
    budget_s: float
    in_a_row: int | None = None
    nccl_tests: tuple[str, ...] = ()


def missing(
    setup: CollectivesSetup, part: BackendPart, rows: Sequence[Row]
) -> tuple[list[tuple[Batch, ...]], list[tuple[str, int, str]]]:
    """Determines what is left to measure.

    Returns:
        The batches of each launch of processes; and ``(collective, size, why not)`` of what does not fit into memory.
    """
    there = {(row["collective"], row["asked_bytes"]) for row in _done(part, rows)}

    def left(batch: Batch) -> Batch:
        return batch._replace(names=tuple(name for name in batch.names if (name, batch.asked_bytes) not in there))

    batches, left_out = fitting(setup.names, setup.sizes, part.ranks, free_bytes(part.ranks.kind))
    dealt = [tuple(one for one in map(left, launch) if one.names) for launch in launches(batches)]
    return [some for some in dealt if some], [one for one in left_out if one[:2] not in there]


def measure_part(this: Run, setup: CollectivesSetup, part: BackendPart, forecast: Forecast) -> None:
    """Measures what is missing of a part, writes each size when it is done, and fits all sizes at the end."""
    common: dict[str, Any] = {"framework": part.framework, "backend": part.backend, "kind": part.ranks.kind}
    threads = THREADS if part.framework == "torchref" else num_cores(part.ranks.kind, part.ranks.num) or os.cpu_count()
    common |= {"num_ranks": part.ranks.num, "threads": threads, "dtype": "float32"}
    rows: list[Row] = _done(part, this.rows)
    if part.why_not and not rows:
        this.say(part.key, this.put(part.key, [common | {"check": f"{NOT_RUN}{part.why_not}"}]))
        return
    to_do, left_out = ([], []) if part.why_not else missing(setup, part, this.rows)
    if rows:
        this.console.print(f"{part.key}: was measured before{', in part' if to_do else ''}", soft_wrap=True)
    for name, asked, why in left_out:
        rows.append(common | {"collective": name, "asked_bytes": asked, "check": f"{NOT_RUN}{why}"})

    def keep(found: Found) -> None:
        made = rows_of(found.timed, part.ranks.num)
        rows[:] = this.put(part.key, in_order([*rows, *(common | found.side._asdict() | row for row in made)]))

    failed, why = _run_ranks(this, setup, part, to_do, forecast, keep)
    if any("device" in row for row in rows):
        for batch, said in failed.items():
            row = common | {"asked_bytes": batch.asked_bytes, "check": f"{FAILED}{size(batch.asked_bytes)}: {said}"}
            rows += [row | {"collective": name} for name in batch.names]
        rows = in_order(rows)
    elif failed:
        rows.append(common | {"check": f"{FAILED}{why}"})
    of_all = common | next(({key: row[key] for key in Side._fields} for row in rows if "device" in row), {})
    this.say(part.key, this.put(part.key, [*rows, *(of_all | fit for fit in fit_rows(rows))]))


def rows_of(of_processes: Sequence[Sequence[Timed]], num_ranks: int) -> list[dict[str, Any]]:
    """Makes the rows of a batch; the time of a call is that of its slowest rank."""
    rows = []
    for of_ranks in zip(*of_processes, strict=True):
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
        if first.in_a_row:
            of_calls = [max(times) for times in zip(*(one.in_a_row for one in of_ranks), strict=True)]
            row["in_a_row_us"] = summarize(of_calls).median_ms * 1e3
        row["rounds_ms"] = [float(f"{each * 1e3:.5g}") for each in seconds]
        rows.append(row)
    return rows


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Sorts the rows of one backend: those not run first, then by collective and size."""

    def place(row: Row) -> tuple[bool, int, int]:
        return not row["check"].startswith(NOT_RUN), NAMES.index(row["collective"]), row["asked_bytes"]

    return sorted(rows, key=place)


def _done(part: BackendPart, rows: Sequence[Row]) -> list[Row]:
    """The rows of calls that need not be measured again; without fits, which are recomputed, and failures."""
    return [row for row in rows if row.get("part") == part.key and "asked_bytes" in row and not is_failed(row)]


def _run_ranks(
    this: Run,
    setup: CollectivesSetup,
    part: BackendPart,
    to_do: Sequence[tuple[Batch, ...]],
    forecast: Forecast,
    keep: Callable[[Found], None],
) -> tuple[dict[Batch, str], str]:
    """Runs the ranks; a batch that their processes do not survive is left out, and the rest is run again.

    Returns:
        The failed batches with their reasons, and the last reason. After ``MAX_FAILED`` sizes, or if processes fail
        before their first batch, all remaining batches count as failed.
    """
    failed: dict[Batch, str] = {}
    why, queue = "", list(to_do)
    while queue:
        in_a_row = (IN_A_ROW if part.ranks.kind == "gpus" else 0) if setup.in_a_row is None else setup.in_a_row
        job = RanksJob(queue.pop(0), setup.num_rounds, setup.budget_s, in_a_row)
        left, ended, error = _run_job(this, part, job, forecast, keep)
        if error is None:
            continue
        asked_bytes, names = ended or job.batches[0]
        why = this.keep_error(f"{part.key}, {size(asked_bytes)} of {', '.join(names)}", error)
        queue = [some for some in (tuple(one for one in left if one != ended), *queue) if some]
        failed |= {} if ended is None else {ended: why}
        began = ended is not None or len(left) < len(job.batches)
        if not began or len({batch.asked_bytes for batch in failed}) == MAX_FAILED:
            failed |= dict.fromkeys([one for some in queue for one in some], f"not tried after: {why}")
            queue = []
    return failed, why


def _run_job(
    this: Run, part: BackendPart, job: RanksJob, forecast: Forecast, keep: Callable[[Found], None]
) -> tuple[list[Batch], Batch | None, Exception | None]:
    """Runs the ranks once: the batches without results and, if the ranks failed, the batch under way and the error."""
    run_ranks = part.ranks.run_jax if part.framework == "jaxddp" else part.ranks.run_torch
    side = jax_side if part.framework == "jaxddp" else torch_side
    left = list(job.batches)
    with progress_of(this.console, part.key) as show:
        follow = forecast.follow(part.key, show)

        def take(rank: int, message: Any) -> None:
            follow(rank, message)
            kind, content, *_ = message
            if rank == 0 and kind == "found":
                keep(content)
                left.remove(content.batch)

        try:
            run_ranks(side.run, job, on_message=take)
        except (RankError, ValueError, OSError) as error:
            return left, follow.under_way, error
        finally:
            follow.close()
    return left, None, None
