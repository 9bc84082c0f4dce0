"""Benchmarks over a slow network: opens a lab around any benchmark, and runs those for which the network matters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..harness.options import Options
from ..harness.run import METRICS, Run, holds, read_rows
from ..suite import Setups, describe_each, finish, run_each
from .link import measure_link
from .network import Lab, open_lab

NAMES = ("strategies", "buckets", "collectives")
QUICK_NAMES = ("buckets",)
NUM_HOSTS, RATE_MBIT = 2, 1000.0


@contextmanager
def lab_for(name: str, options: Options) -> Iterator[Options]:
    """Keeps a lab open if a benchmark is to run in one; ``ranks_of_machine`` finds it.

    Yields:
        The options; in a lab with its kind of ranks and, by default, one rank per host.

    Raises:
        ValueError: If options contradict each other, or no lab can be made.
    """
    if name == "lab" and options.on not in (None, "lab"):
        raise ValueError(f"on (={options.on}) must be lab, or left out, where the benchmark is lab")
    if name not in ("lab", "all") and options.on != "lab":
        for argument in ("hosts", "rate_mbit"):
            if (given := getattr(options, argument)) is not None:
                raise ValueError(f"{argument} (={given:g}) is of a lab alone, and on (={options.on}) is not lab")
        yield options
        return
    num_hosts = NUM_HOSTS if options.hosts is None else options.hosts
    rate_mbit = RATE_MBIT if options.rate_mbit is None else options.rate_mbit
    planned = Lab(num_hosts, rate_mbit)
    if name == "all" and options.on != "lab":  # it opens a lab later, for one of its benchmarks
        yield options
        return
    with planned:
        ranks = num_hosts if options.ranks is None else options.ranks
        yield replace(options, on="lab", hosts=num_hosts, rate_mbit=rate_mbit, ranks=ranks)


def link_holds(options: Options, folder: Path, console: Console) -> bool:
    """Measures the open lab's link into a folder of its own: whether it is as requested; True without a lab."""
    if options.on != "lab":
        return True
    (folder / "link").mkdir(exist_ok=True)
    this = Run(folder / "link", console, "lab")

    def measure() -> Iterator[Mapping[str, Any]]:
        link = measure_link(open_lab())
        console.print(link.in_words, style=None if link.check == "ok" else "bold red", soft_wrap=True)
        yield asdict(link) | {"round_trip": link.round_trip._asdict(), "line": link.in_words, "check": link.check}

    # A resumed run has a new lab, so its link is measured again.
    return holds(this.part(f"link {len(this.rows) + 1}", measure))


def describe(options: Options) -> tuple[Setups, str]:
    """Describes the benchmarks that are run, as they do."""
    setups, lab = describe_each(QUICK_NAMES if options.quick else NAMES, options), open_lab()
    return setups, f"{len(lab.hosts)} hosts, links of {lab.rate_mbit:g} Mbit/s each way: {', '.join(setups)}"


def run(this: Run, setups: Setups) -> bool:
    """Runs the benchmarks, each with a folder of its own."""
    run_each(this, setups)
    return finish(this, [link["line"] for link in read_rows(this.folder / "link" / METRICS)[0]])
