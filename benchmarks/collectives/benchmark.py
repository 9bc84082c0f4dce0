"""Every collective by size, number of ranks and backend: the time of a call, and the bandwidth of a rank.

    python -m benchmarks collectives --ranks 2 --sizes-mb 1 10 100

A backend with a number of ranks is one part of the run. Parts run one after the other, so ratios of frameworks compare
two parts. Simulated devices copy within one memory and send nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..harness.free_memory import free_bytes
from ..harness.job_hosts import open_hosts
from ..harness.options import Options
from ..harness.ranks import Ranks, num_gpus, ranks_of_machine
from ..harness.run import Run
from ..harness.values import size
from ..report.section import show
from . import nccl_tests
from .cases import NAMES, QUICK_NAMES
from .forecast import START_S, Forecast, assumed_network, duration, forecast_s
from .interleaving import MIN_ROUNDS, Batch
from .part import BackendPart, CollectivesSetup, measure_part, missing
from .section import section
from .sizes import asked_sizes, check_fit

RANKS = (2, 4, 6)  # as in the assignment report
BUDGET_S, QUICK_BUDGET_S = 3.0, 1.0  # of timed rounds per size
BACKENDS = (
    ("jaxddp", "simulated"),
    ("jaxddp", "processes"),
    ("torchref", "processes"),
    ("jaxddp", "gpus"),
    ("torchref", "gpus"),
)


def describe(options: Options) -> tuple[CollectivesSetup, str]:
    """Describes what is measured.

    Defaults: 2, 4 and 6 ranks (with GPUs also all of them), every backend, 1 KiB to 1 GiB by powers of 4 as far as
    memory allows, and as many rounds as the time allows, but at least 5. The short form has four collectives of up to
    16 MiB on 2 ranks.

    Raises:
        ValueError: If there are too few ranks, rounds or GPUs, sizes given by hand do not fit, or a file is not of
            nccl-tests.
        OSError: If a file cannot be read.
    """
    if options.steps is not None and options.steps < MIN_ROUNDS:
        raise ValueError(f"steps (={options.steps}) must be at least {MIN_ROUNDS} rounds, or the spread means nothing")
    parts = _parts(options)
    names = QUICK_NAMES if options.quick else NAMES
    sizes = asked_sizes(options.sizes_mb, options.quick)
    budget_s = QUICK_BUDGET_S if options.quick else BUDGET_S
    files = options.nccl_tests or ()
    for path in files:
        nccl_tests.read_file(path)  # a wrong one is refused before anything is measured
    setup = CollectivesSetup(parts, names, sizes, options.steps, budget_s, options.in_a_row, files)
    there = [part for part in parts if not part.why_not]
    if options.sizes_mb:
        for part in there:
            check_fit(names, sizes, part.ranks, free_bytes(part.ranks.kind))
    where = {"gpus": "GPUs", "lab": "the lab's links"}
    assumed = {where.get(part.ranks.kind, "CPUs"): assumed_network(part.ranks) for part in there}
    speeds = " and ".join(f"{network.gb_per_s:.3g} GB/s on {what}" for what, network in assumed.items())
    described = (
        f"{len(names)} collectives of {size(sizes[0])} to {size(sizes[-1])}:"
        f" {'; '.join(part.key for part in there)}; about {duration(sum(_forecast(setup, there).values()))} if a rank"
        f" sends {speeds}, corrected as it goes"
    )
    return setup, described


def run(this: Run, setup: CollectivesSetup) -> bool:
    """Measures every part, prints the tables and writes the folder."""
    forecast = Forecast(_forecast(setup, [part for part in setup.parts if not part.why_not], this.rows))
    for part in setup.parts:
        measure_part(this, setup, part, forecast)
        forecast.skip(part.key)
    for num_ranks in sorted({part.ranks.num for part in setup.parts if part.ranks.kind == "gpus" and not part.why_not}):
        if programs := nccl_tests.installed(setup.names):
            key = f"{nccl_tests.NAME}, {num_ranks} ranks"
            this.part(key, lambda num=num_ranks, of=programs: nccl_tests.rows(of, setup.sizes, num))  # type: ignore[misc]
    for path in setup.nccl_tests:
        this.part(f"{nccl_tests.NAME}, {path}", partial(nccl_tests.read_file, path))
    return show(this, section(this.rows))


def _parts(options: Options) -> tuple[BackendPart, ...]:
    if options.ranks == 1:
        raise ValueError("ranks (=1) must be at least 2: one rank has no other to communicate with")
    if options.on == "job":
        return _parts_of_job(options)
    found_gpus = num_gpus()
    if options.on == "gpus":
        ranks_of_machine(2, "gpus")  # raises if there are none
        if options.ranks is not None and options.ranks > found_gpus:
            raise ValueError(f"ranks (={options.ranks}) must be at most the number of GPUs (={found_gpus})")
    backends: Sequence[tuple[str, str]] = BACKENDS
    if options.on:  # torch's ranks are always processes
        backends = (("jaxddp", options.on), ("torchref", options.on.replace("simulated", "processes")))
    counts = (options.ranks,) if options.ranks else (2,) if options.quick else RANKS
    wanted = [(backend, num_ranks) for num_ranks in counts for backend in backends]
    if counts is RANKS and found_gpus > max(RANKS):  # on CPUs, more ranks would only share the cores
        wanted += [(backend, found_gpus) for backend in backends if backend[1] == "gpus"]
    return tuple(dict.fromkeys(_part(*backend, num_ranks, found_gpus) for backend, num_ranks in wanted))


def _parts_of_job(options: Options) -> tuple[BackendPart, ...]:
    hosts = open_hosts()
    default = max(2, hosts.num_hosts)
    most = hosts.num_hosts * hosts.num_gpus or max(RANKS)
    counts = {default} | {num for num in RANKS if num % hosts.num_hosts == 0 and num <= most}
    counts |= {most} if hosts.num_gpus else set()
    if options.ranks or options.quick:
        counts = {options.ranks or default}
    of_jobs = [ranks_of_machine(num_ranks, "job") for num_ranks in sorted(counts)]
    return tuple(
        BackendPart(framework, layout)
        for ranks in of_jobs
        for framework in ("jaxddp", "torchref")
        for layout in (ranks.layouts() if framework == "jaxddp" else [ranks])
    )


def _part(framework: str, kind: str, num_ranks: int, found_gpus: int) -> BackendPart:
    if kind == "gpus" and found_gpus < 2:
        why_not = "one GPU, and ranks need one each" if found_gpus else "no GPU"
        return BackendPart(framework, Ranks(num_ranks, kind), why_not)
    return BackendPart(framework, ranks_of_machine(num_ranks, kind))


def _forecast(
    setup: CollectivesSetup, parts: Sequence[BackendPart], rows: Sequence[Mapping[str, Any]] = ()
) -> dict[tuple[str, Batch], float]:
    """Forecasts the seconds of each missing batch."""
    seconds = {}
    for part in parts:
        for launch in missing(setup, part, rows)[0]:
            for batch in launch:
                start_s = START_S if batch is launch[0] else 0.0
                seconds[part.key, batch] = start_s + forecast_s(batch, part.ranks, setup.num_rounds, setup.budget_s)
    return seconds
