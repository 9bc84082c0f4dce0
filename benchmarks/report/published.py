"""The assignment report's figures beside ours, with the reason for each difference; ``published.json`` has them.

The machines differ, so only shares of a step, ratios within one run, and bandwidths are compared. The report's errors
are worked out in ``docs/published-figures.md``, rows T1.claims, T2.exposed, B.fit_predict and S.time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..harness.tables import Column, Table, field, numeric
from ..harness.values import NONE, Row, buffer_bytes, by, number, percent, plain, size, text
from .runs import experiment_of
from .sentences import exposed_share, timed

# Our backends that correspond to the report's.
_SAME_BACKEND = {"Gloo": ("Gloo", "XLA over Gloo", "XLA in-process"), "NCCL": ("NCCL", "XLA over NCCL")}
_COLUMNS = (
    field("figure"),
    field("the report says", "says"),
    field("right", "right"),
    field("here", "here"),
    field("why they differ", "why", is_wide=True),
)


@cache
def figures() -> dict[str, Any]:
    """The contents of ``published.json``."""
    return json.loads((Path(__file__).parent / "published.json").read_text())


def strategies_beside(rows: Sequence[Row]) -> Table | None:
    """Compares shares of exposed communication, and ratios of steps; None if no row has a counterpart."""
    report = {one["strategy"]: one for one in figures()["strategies"]["rows"]}
    compared = _fewest_ranks(rows)
    lines: list[Row] = []
    for strategy, one in report.items():
        if "exposed_ms" in one:
            says, right = (percent(one[key] / one["step_ms"]) for key in ("says_exposed_ms", "exposed_ms"))
            here = _by_framework(compared, partial(_share, strategy=strategy))
            lines.append(_line(f"{strategy}: exposed share", says, right, here, one["why"]))
    for strategy, peer in (("flat", "naive"), ("overlapped", "naive"), ("zero1", "bucketed")):
        ratio = f"{report[strategy]['step_ms'] / report[peer]['step_ms']:.2f}"
        why = report[strategy]["why"] if strategy == "zero1" else "what communication costs beside computation"
        here = _by_framework(compared, partial(_ratio, strategy=strategy, peer=peer))
        lines.append(_line(f"step of {strategy} / {peer}", ratio, ratio, here, why))
    return _table("Exposed communication as a share of the step, and ratios of steps", lines, "strategies", rows)


def collectives_beside(rows: Sequence[Row]) -> Table | None:
    """Compares all-reduces of the same size on as many ranks; None if no row has a counterpart."""
    ours = [row for row in timed(rows) if text(row, "collective").replace("_", "-") == "all-reduce"]
    lines = [
        {"report": one, "here": row}
        for one in figures()["collectives"]
        for row in ours
        if buffer_bytes(row) == one["size_bytes"]
        and row.get("num_ranks") == one["num_ranks"]
        and text(row, "backend") in _SAME_BACKEND[one["backend"]]
    ]
    columns = (
        Column("the report's backend", lambda row: text(row["report"], "backend")),
        Column("here", lambda row: f"{text(row['here'], 'framework')}, {text(row['here'], 'backend')}"),
        numeric("ranks", "report", "num_ranks", form=lambda value: f"{value:.0f}"),
        numeric("size", "report", "size_bytes", form=size),
        numeric("the report's call", "report", "mean_ms", unit="ms, mean"),
        numeric("call here", "here", "median_ms", unit="ms, median"),
        numeric("the report's busbw", "report", "busbw_gb_per_s", unit="GB/s"),
        numeric("busbw here", "here", "busbw_gb_per_s", unit="GB/s"),
    )
    note = (
        f"{_machines('collectives', rows)} Simulated devices copy within one memory and send nothing. The report says"
        " that NCCL gains least on small tensors; by its own numbers, with 4 and 6 ranks, it gains most there."
    )
    return Table("All-reduce of the same size on as many ranks", columns, lines, note) if lines else None


def buckets_beside(rows: Sequence[Row], optima: Sequence[Row]) -> Table | None:
    """Compares steps by bucket size, as ratios to the best of them, and the optimum by formula; None without either."""
    report = figures()["buckets"]
    best_ms = min(one["step_ms"] for one in report["rows"])
    lines: list[Row] = []
    for one in report["rows"]:
        cap, ratio = one["bucket_mb"], f"{one['step_ms'] / best_ms:.3f}"
        here = _by_framework(timed(rows), partial(_to_best, cap=cap), key=lambda row: number(row, "bucket_mb"))
        lines.append(_line(f"step with {cap:g} MB / best", ratio, ratio, here, one["why"]))
    found = [
        f"{text(row, 'framework')} {plain(value)} MiB".strip()
        for row in optima
        if (value := number(row, "uniform_optimum_mb")) is not None
    ]
    says, here = f"{report['says_optimum_mb']:g} MiB", ", ".join(dict.fromkeys(found))
    lines.append(_line("best cap by formula", says, report["optimum"], here, report["why"]))
    return _table("Bucket sizes as ratios to the best", lines, "buckets", rows)


def _line(figure: str, says: str, right: str, here: str, why: str) -> Row:
    return {"figure": figure, "says": says, "right": right, "here": here, "why": why}


def _table(caption: str, lines: Sequence[Row], part: str, rows: Sequence[Row]) -> Table | None:
    lines = [line for line in lines if line["here"]]
    return Table(caption, _COLUMNS, lines, _machines(part, rows)) if lines else None


def _fewest_ranks(rows: Sequence[Row]) -> list[Row]:
    """The sound rows of each framework with its fewest ranks, because the report has 2."""
    kept = []
    for some in by(timed(rows), lambda row: text(row, "framework")).values():
        fewest = min(number(row, "num_ranks") or 0 for row in some)
        kept += [row for row in some if (number(row, "num_ranks") or 0) == fewest]
    return kept


def _by_framework(
    rows: Sequence[Row],
    of: Callable[[dict[Any, Row]], str],
    key: Callable[[Row], Any] = lambda row: text(row, "strategy"),
) -> str:
    """The figure of each framework that has it, in words."""
    found = []
    for framework, some in by(rows, lambda row: text(row, "framework")).items():
        figure = of({key(row): row for row in reversed(some)})  # the shortest of several
        found += [f"{framework} {figure}"] if figure else []
    return ", ".join(found)


def _share(of: dict[Any, Row], strategy: str) -> str:
    share = exposed_share(of[strategy]) if strategy in of else None
    return "" if share is None else percent(max(share, 0.0))


def _ratio(of: dict[Any, Row], strategy: str, peer: str) -> str:
    return f"{of[strategy]['median_ms'] / of[peer]['median_ms']:.2f}" if strategy in of and peer in of else ""


def _to_best(of: dict[Any, Row], cap: float) -> str:
    best = min((row["median_ms"] for row in of.values()), default=0)
    return f"{of[cap]['median_ms'] / best:.3f}" if cap in of and best else ""


def _machines(part: str, rows: Sequence[Row]) -> str:
    """The machines of the report and of these rows."""
    report = figures()[part] if isinstance(figures()[part], dict) else {}
    what = f"{report['model']}, {report['num_ranks']} ranks, NCCL, " if report else ""
    here = "; ".join(filter(None, by(rows, _machine_of))) or NONE
    both = f"The assignment report: {what}{figures()['machine']}. Here: {here}."
    return f"{both} Shares and ratios depend on how fast each machine computes relative to how fast it sends."


def _machine_of(row: Row) -> str:
    """Device, backend and network of a row; empty if they are not recorded."""
    on = [text(row, "device"), text(row, "backend")]
    return ", ".join(filter(None, [*on, experiment_of(row).network if any(on) else ""]))
