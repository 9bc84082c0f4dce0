"""A benchmark is one value: what is measured, how, and how its rows are shown and judged.

    cases(options)      what is measured, one after the other; refuses wrong options before anything runs
    measure(case, say)  rows of a case, each with a ``check``: "ok", or what is wrong with it
    check(rows)         rows that compare the others, such as ratios with their limits
    columns             the tables, by title; a row belongs to ``row["table"]``, or to the first
    plot(rows)          figures

`run` appends each row to ``metrics.jsonl`` as soon as it is there, then makes ``table.md`` and ``report.html``. Under
srun, torchrun or mpirun it runs in every process, which takes the same cases in the same order; the first one writes.
"""

import argparse
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jaxddp.cli.doctor import gpus, variables
from torchref.launch import RankError

from .render import Column, Row, is_bad, write

METRICS = "metrics.jsonl"
NOT_RUN, FAILED, WRONG = "not run: ", "FAILED: ", "WRONG: "
# Every row has these, None where they do not apply.
FIELDS = (
    "benchmark", "framework", "backend", "device", "num_ranks", "strategy", "bucket_mb", "dtype", "params_bytes",
    "global_batch", "microbatch", "median_ms", "p10_ms", "p90_ms", "exposed_ms", "check",
)  # fmt: skip
Say = Callable[[str], None]
Options = argparse.Namespace


class NotRun(Exception):
    """Raised by a case that cannot be measured here; the message is the reason. Not a failure."""


class Case(NamedTuple):
    """Something to measure, and its name; ``setup`` is the benchmark's own, ``folder`` that of the run."""

    name: str
    setup: Any
    folder: Path | None = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, with the names of the options that it takes and the sentences below its tables."""

    name: str
    summary: str
    options: tuple[str, ...]
    cases: Callable[[Options], Sequence[Case]]
    measure: Callable[[Case, Say], Iterable[Mapping[str, Any]]]
    columns: Mapping[str, Sequence[Column]]
    plot: Callable[[Sequence[Row]], Iterable[Any]] = lambda rows: ()
    check: Callable[[Sequence[Row]], Iterable[Mapping[str, Any]]] = lambda rows: ()
    notes: Sequence[str] = ()
    strategies: Collection[str] = ()  # to choose from; empty: ours and what the frameworks do by themselves


def run(benchmark: Benchmark, cases: Sequence[Case], folder: Path | None, say: Say, about: Mapping[str, Any]) -> bool:
    """Measures the cases and writes the folder, if it is given; in a job only its first process has one.

    Rows also have the fields of ``about``, the lab or job that ranks run in. Returns whether none failed or is wrong.
    """
    rows: list[Row] = []
    common = {"benchmark": benchmark.name, **environment(), **about}

    def keep(row: Mapping[str, Any], case: str) -> None:
        assert "check" in row, f"a row of {case} has no check"
        now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
        rows.append(dict.fromkeys(FIELDS) | common | {"case": case, "measured_at": now} | dict(row))
        if folder is not None:
            with (folder / METRICS).open("a") as lines:
                lines.write(json.dumps(rows[-1]) + "\n")

    for case in cases:
        num_before = len(rows)
        try:
            for row in benchmark.measure(case._replace(folder=folder), say):
                keep(row, case.name)
        except NotRun as reason:
            keep({"check": f"{NOT_RUN}{reason}"}, case.name)
        except (RankError, ValueError, OSError) as error:
            if "job_ranks" in about:  # the other processes would wait for this one: the launcher has to end them
                raise
            keep({"check": f"{FAILED}{first_line(error)}", "error": str(error)}, case.name)
        if len(rows) > num_before and rows[-1]["check"].startswith((NOT_RUN, FAILED)):
            say(f"{case.name}: {rows[-1]['check']}")
    for row in list(benchmark.check(rows)):
        keep(row, "comparison")
    if folder is not None:
        say(write(folder, benchmark, rows))
    return not any(map(is_bad, rows))


def new_folder(out: str | None, name: str) -> Path:
    """Makes the folder of a run, a new one under ``runs/`` if ``out`` is None; nothing is overwritten."""
    folder = Path(out) if out else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out (={folder}) must not exist, or be an empty folder: nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def environment() -> dict[str, Any]:
    """The fields of rows about the machine, the versions and the command."""
    commit = ""  # checked out beside this file, with "+" if files differ from it
    with suppress(OSError):
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    found = gpus()
    if_any = {"driver": found and found[0].driver, "gpus": [gpu.name for gpu in found], "variables": variables()}
    return {
        "commit": commit, "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "machine": platform.machine(), "cores": os.cpu_count(), "system": platform.system(),
        "python": platform.python_version(), **{name: value for name, value in if_any.items() if value},
    }  # fmt: skip


def first_line(error: BaseException) -> str:
    """Of what an error says, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]
