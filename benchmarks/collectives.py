"""Every collective by size, number of ranks and backend: the time of a call, and the bandwidth of a rank.

    python -m benchmarks collectives --ranks 2 --sizes-mb 1 10 100

A backend with a number of ranks is one case. Every round calls each collective of a size once; the time of a call is
that of its slowest rank, and the result of every call is checked bit for bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from jaxddp.training.clock import summarize

from .benchmark import FAILED, NOT_RUN, WRONG, Benchmark, Case, Options, Say
from .collective_calls import jax_call, torch_call
from .collective_cases import NAMES, QUICK_NAMES, rates
from .ranks import PROCESS_BYTES, Ranks, about, agree, choose_ranks, free_bytes, gather, num_gpus, say_on_rank, slowest
from .render import CHECK, STEP, Column, Row, by, counts, new_figure, size
from .timing import Attempts, interleave

RANKS = (2, 4, 6)  # as in the assignment report
KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES, QUICK_SIZES = tuple(KIB * 4**power for power in range(11)), (16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB)
MIN_ROUNDS, MAX_ROUNDS, NUM_WARMUP = 5, 100, 2
BUDGET_S, QUICK_BUDGET_S = 3.0, 1.0  # of the timed rounds of a size
# Peak memory of a rank, in full buffers, with its inputs: measured on 2 ranks in the framework that needs more, rounded
# up. Gloo and rings copy, and freed memory that a process keeps is fragmented.
HELD = 12.5


@dataclass(frozen=True)
class Sweep:
    """The sizes of one backend on ranks; plain data, sent to their processes. ``num_rounds`` None: as many as fit."""

    framework: str
    ranks: Ranks
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    num_rounds: int | None
    budget_s: float


def cases(options: Options) -> list[Case]:
    """Each backend with 2, 4 and 6 ranks, on GPUs also with all of them."""
    if options.steps is not None and options.steps < MIN_ROUNDS:
        raise ValueError(f"steps (={options.steps}) must be at least {MIN_ROUNDS} rounds, or the spread means nothing")
    if options.ranks == 1:
        raise ValueError("ranks (=1) must be at least 2: one rank has no other to communicate with")
    names, budget_s = (QUICK_NAMES, QUICK_BUDGET_S) if options.quick else (NAMES, BUDGET_S)
    sizes = QUICK_SIZES if options.quick else SIZES
    if options.sizes_mb:
        sizes = tuple(sorted({int(one * MIB) for one in options.sizes_mb}))
        if sizes[0] < KIB:
            raise ValueError(f"sizes_mb (={sizes[0] / MIB:g}) must be at least 1 KiB, {KIB / MIB:g} MiB")
    return [
        Case(
            f"{ranks.backend(framework)}, {ranks.num} ranks",
            Sweep(framework, ranks, names, sizes, options.steps, budget_s),
        )
        for ranks, framework in _backends(options)
    ]


def _backends(options: Options) -> Iterator[tuple[Ranks, str]]:
    num_found = num_gpus() if options.on in (None, "gpus") else 0
    if options.on == "gpus" and not options.ranks and num_found < 2:
        raise ValueError(f"on (=gpus) needs 2 GPUs or more that both frameworks find (={num_found})")
    default = (2,) if options.quick else RANKS
    for kind in [options.on] if options.on else ["simulated", "processes", *(["gpus"] if num_found else [])]:
        counts: Sequence[int | None] = default if kind in ("simulated", "processes") else [None]  # all that are there
        if kind == "gpus":
            counts = sorted({num for num in (*default, num_found) if 2 <= num <= num_found})
        for num in [options.ranks] if options.ranks else counts:
            ranks = choose_ranks(num, kind, default=2)
            both = ("jaxddp",) if kind == "simulated" and not options.on else ("jaxddp", "torchref")
            yield from ((ranks, framework) for framework in both)


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """Rows of a sweep, collective by collective."""
    sweep: Sweep = case.setup
    say(f"{case.name}: {size(sweep.sizes[0])} to {size(sweep.sizes[-1])}")
    (sizes, left_out), ranks, framework = fitting(sweep), sweep.ranks, sweep.framework
    rows = ranks.run(time_sweep, sweep, sizes, in_jax=framework == "jaxddp", say=say) if sizes else []
    rows.sort(key=lambda row: (NAMES.index(row["collective"]), row["asked_bytes"]))
    common = {"framework": framework, "backend": ranks.backend(framework), "num_ranks": ranks.num}
    rows += [common | {"asked_bytes": asked, "check": f"{NOT_RUN}{why}"} for asked, why in left_out]
    yield from rows


def fitting(sweep: Sweep) -> tuple[list[int], list[tuple[int, str]]]:
    """The sizes that fit into memory, largest first, whose freed memory serves the others; and why the rest do not."""
    ranks, sizes, left_out = sweep.ranks, [], []
    on_gpus, free = ranks.kind == "gpus", 0.95 * free_bytes(ranks.kind)
    sharing = 1 if on_gpus or ranks.is_job else ranks.num  # so many share the free memory
    processes = 0 if on_gpus else PROCESS_BYTES * (1 if ranks.kind == "simulated" else sharing)
    for asked in sorted(sweep.sizes, reverse=True):
        needed = HELD * asked * sharing + processes
        if needed <= free:
            sizes.append(asked)
        else:
            left_out.append((asked, f"{size(asked)} needs {needed / GIB:.1f} GiB, {free / GIB:.1f} can be had"))
    return sizes, left_out


def time_sweep(ranks: Ranks, sweep: Sweep, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Times all sizes; runs on each rank."""
    call_of = partial(jax_call if sweep.framework == "jaxddp" else torch_call, ranks)
    rows: list[dict[str, Any]] = []
    for asked in sizes:
        say_on_rank(f"{ranks.backend(sweep.framework)}, {ranks.num} ranks: {size(asked)}")
        attempt = Attempts(agree)
        made = {name: attempt(name, partial(call_of, name, asked)) for name in sweep.names}
        rows += _time_calls(sweep, asked, {name: call for name, call in made.items() if call}, attempt)
        failed = {name: f"{FAILED}{why}" for name, why in attempt.failed.items()}
        rows += [{"collective": name, "asked_bytes": asked, "check": check} for name, check in failed.items()]
    common = about(ranks, sweep.framework) | {"dtype": "float32"}
    return [common | row for row in rows]


def _time_calls(sweep: Sweep, asked: int, calls: dict[str, Any], attempt: Attempts) -> Iterator[dict[str, Any]]:
    inputs: dict[str, Any] = {}
    wrong = dict.fromkeys(calls, 0)

    def before(name: str) -> None:
        inputs[name] = calls[name].prepare()
        dist.barrier()

    def after(name: str, result: Any) -> None:
        wrong[name] += calls[name].num_wrong(result)  # of every call: XLA's Gloo is sometimes wrong
        say_on_rank()

    steps = {name: (lambda index, name=name: calls[name].run(inputs[name])) for name in calls}
    _, tried = interleave(steps, NUM_WARMUP, 1, attempt=attempt, before=before, after=after)
    steps = {name: step for name, step in steps.items() if name in tried}
    round_s = gather(sum(times[0] for times in tried.values()))[0]  # rank 0's: all take the same number of rounds
    num_rounds = sweep.num_rounds or int(np.clip(sweep.budget_s / max(round_s, 1e-9), MIN_ROUNDS, MAX_ROUNDS))
    _, seconds = interleave(steps, num_rounds, 0, attempt=attempt, before=before, after=after)
    for name, of_rank in seconds.items():
        call, times = calls[name], slowest(of_rank)
        timings = summarize(times)
        algbw, busbw = rates(name, call.size_bytes, timings.median_ms * 1e-3, sweep.ranks.num)
        found, num_wrong = call.found, sum(gather(wrong[name]))
        row = {
            "collective": name, "asked_bytes": asked, "size_bytes": call.size_bytes, **timings._asdict(),
            "num_rounds": num_rounds, "algbw_gb_per_s": algbw, "busbw_gb_per_s": busbw, "kernel": call.kernel,
            "planned": call.planned, "compiled": found, "rounds_ms": [float(f"{each * 1e3:.5g}") for each in times],
            "check": f"{WRONG}{num_wrong:,} values" if num_wrong else "ok",
        }  # fmt: skip
        if call.planned is not None and sorted(call.planned) != sorted(found):
            row["check"] = f"{WRONG}other collectives than planned"
        yield row


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """Time of a call and bus bandwidth by size, a row of panels for each collective."""
    placed = by([row for row in rows if row.get("busbw_gb_per_s")], "collective")
    for (name,), some in placed.items():
        figure, axes = new_figure(name.replace("_", "-"), 1, 2)
        columns = (("median_ms", "ms"), ("busbw_gb_per_s", "bus bandwidth, GB/s"))
        for axis, (key, label) in zip(axes[0], columns, strict=True):
            for (backend, num_ranks), curve in by(some, "backend", "num_ranks").items():
                points = [(row["asked_bytes"], row[key]) for row in curve if row.get(key)]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=f"{backend}, {num_ranks} ranks")
            axis.set(xscale="log", yscale="log", xlabel="bytes of the buffer", ylabel=label)
        axes[0][0].legend(fontsize="small")
        yield figure


BENCHMARK = Benchmark(
    "collectives", "every collective by size, ranks and backend",
    ("quick", "ranks", "on", "hosts", "rate_mbit", "steps", "sizes_mb"), cases, measure,
    {
        "Calls by collective and size": (
            Column("collective", lambda row: (row.get("collective") or row["case"]).replace("_", "-")),
            Column("framework"), Column("backend"), Column("ranks", "num_ranks"),
            Column("size", "asked_bytes", form=size), *STEP, Column("rounds", "num_rounds"),
            Column("algbw", "algbw_gb_per_s", "GB/s"), Column("busbw", "busbw_gb_per_s", "GB/s"),
            Column("planned", form=counts), Column("found", "compiled", form=counts), Column("kernel"), CHECK,
        ),
    },
    plot,
    notes=(
        "algbw: bytes of the full buffer over the time of a call; busbw: algbw times the share of the buffer that a"
        " rank has to send, as nccl-tests have it",
        "found: AR all-reduce, RS reduce-scatter, AG all-gather, CP collective-permute, of XLA as compiled, of torch as"
        " issued; over Gloo, others replace XLA's reduce-scatter and all-gather",
    ),
)  # fmt: skip
