"""Rows of results: one JSON object a line, a Markdown table, and the same table in the terminal."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from .measure import Measured, Setup, SideResult

# A wrong divisor is wrong by a factor of the number of ranks at least; what weights apart by rounding do to losses and
# norms over some 20 steps was seen to be under 0.1 %.
METRIC_TOLERANCE = 0.01


@dataclass(frozen=True)
class Row:
    """One variant's result, with everything needed to read it alone; ``check`` says whether it may be believed."""

    benchmark: str
    framework: str
    backend: str
    device: str
    ranks: str
    kind: str
    num_ranks: int
    strategy: str
    bucket_mb: float | None
    dtype: str
    params_bytes: int
    global_batch: int
    microbatch: int
    planned: list[tuple[str, int]]
    compiled: list[tuple[str, int]]
    first_loss: float
    loss: float
    max_weight_difference: float
    max_metric_difference: float
    tolerance: float | None
    median_ms: float
    p10_ms: float
    p90_ms: float
    exposed_ms: float | None
    check: str
    versions: dict[str, str]
    commit: str
    command: str


def make_rows(
    benchmark: str, framework: str, setup: Setup, side: SideResult, tolerance: float | None, must_learn: bool = True
) -> list[Row]:
    """Turns what one framework's process found into rows.

    Args:
        benchmark: Name of the benchmark.
        framework: ``"jaxddp"`` or ``"torchref"``.
        setup: What was run.
        side: What was found.
        tolerance: How far weights may be from single-process training; None to go by losses and gradient norms alone.
        must_learn: Whether the loss has to fall; random tokens teach nothing.

    Returns:
        A row for each strategy, in the setup's order.
    """
    rows = []
    for spec in setup.strategies:
        measured = side.measured[spec.label]
        timings = measured.timings
        rows.append(
            Row(
                benchmark=benchmark,
                framework=framework,
                backend=side.backend,
                device=side.device,
                ranks=side.ranks,
                kind=side.kind,
                num_ranks=side.num_ranks,
                strategy=spec.name,
                bucket_mb=spec.bucket_mb,
                dtype=str(next(iter(side.trained.values())).dtype),
                params_bytes=sum(array.nbytes for array in side.trained.values()),
                global_batch=setup.global_batch,
                microbatch=setup.global_batch // side.num_ranks,
                planned=measured.planned,
                compiled=measured.found,
                first_loss=measured.metrics[0].loss,
                loss=measured.metrics[-1].loss,
                max_weight_difference=measured.max_weight_difference,
                max_metric_difference=measured.max_metric_difference,
                tolerance=tolerance,
                median_ms=timings.median_ms,
                p10_ms=timings.p10_ms,
                p90_ms=timings.p90_ms,
                exposed_ms=measured.exposed_ms,
                check=check(measured, tolerance, must_learn),
                versions=side.versions | {"python": platform.python_version()},
                commit=commit(),
                command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
            )
        )
    return rows


def check(measured: Measured, tolerance: float | None, must_learn: bool = True) -> str:
    """``"ok"``, or what is wrong with a run."""
    if sorted(measured.planned) != sorted(measured.found):
        return f"WRONG: {len(measured.planned)} collectives planned, others found"
    if tolerance is not None and not measured.max_weight_difference <= tolerance:  # NaN is wrong too
        return f"WRONG: weights differ by more than {tolerance:.0e}"
    if not measured.max_metric_difference <= METRIC_TOLERANCE:
        return f"WRONG: loss or gradient norm differs by more than {METRIC_TOLERANCE:.0%}"
    if must_learn and measured.metrics[-1].loss >= measured.metrics[0].loss:
        return "WRONG: the loss did not fall"
    return "ok"


def new_run_folder(out: str | None, benchmark: str) -> Path:
    """Makes the folder of a run; nothing is ever overwritten.

    Args:
        out: Its path; a new one under ``runs/`` when None.
        benchmark: For the name of the latter.

    Returns:
        The folder, which exists and is empty.

    Raises:
        ValueError: If ``out`` exists and is not an empty folder.
    """
    folder = Path(out) if out else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{benchmark}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out (={folder}) must not exist, or be an empty folder: nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_rows(folder: Path, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Appends rows to ``metrics.jsonl`` and writes ``table.md``, with notes below the table."""
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    columns, units = zip(*_COLUMNS, strict=True)
    body = ["| " + " | ".join(cells(row)) + " |" for row in rows]
    table = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns), "| " + " | ".join(units) + " |", *body]
    (folder / "table.md").write_text("\n".join([*table, "", *(f"- {note}" for note in notes), ""]))


def terminal_table(rows: Sequence[Row], title: str) -> Table:
    """The table for a terminal."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, unit in _COLUMNS:
        is_text = name in ("framework", "strategy", "ranks", "check")
        table.add_column(f"{name}\n[dim]{unit}[/dim]", justify="left" if is_text else "right", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row.framework):
            table.add_section()
        previous = row.framework
        style = None if row.check == "ok" else "bold red"
        table.add_row(*(cell.replace("[", r"\[") for cell in cells(row)), style=style)
    return table


_COLUMNS = (
    ("framework", ""),
    ("strategy", ""),
    ("ranks", ""),
    ("planned", ""),
    ("compiled", ""),
    ("loss", "nats"),
    ("max diff", ""),
    ("step", "ms"),
    ("p10-p90", "ms"),
    ("exposed", "ms"),
    ("check", ""),
)


def cells(row: Row) -> list[str]:
    """What a row shows in a table; ``_COLUMNS`` names it."""
    return [
        row.framework,
        row.strategy if row.bucket_mb is None else f"{row.strategy} {row.bucket_mb:g} MiB",
        f"{row.num_ranks} {row.kind}",
        counts(row.planned),
        counts(row.compiled),
        f"{row.loss:.3f}",
        f"{row.max_weight_difference:.1e}",
        f"{row.median_ms:.0f}",
        f"{row.p10_ms:.0f}-{row.p90_ms:.0f}",
        "not run" if row.exposed_ms is None else f"{row.exposed_ms:+.0f}",
        row.check,
    ]


def counts(collectives: Sequence[tuple[str, int]]) -> str:
    """How many collectives of each kind: AR is all-reduce, RS reduce-scatter, AG all-gather."""
    kinds = Counter("".join(word[0].upper() for word in kind.split("-")) for kind, _ in collectives)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


def commit() -> str:
    """The commit that is checked out beside this file, with ``+`` if files differ from it; empty if there is none."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    import os

    return {"machine": platform.machine(), "cores": os.cpu_count(), "system": platform.system()}
