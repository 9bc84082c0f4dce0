"""The figures of the assignment report beside ours, with the reason for each difference; ``source.json`` has them.

The machines differ, so their times do: only shares of a step, ratios within one run, and bandwidths are
compared. The report's errors are worked out in
``docs/source-figures.md``, rows T1.claims, T2.exposed, B.fit_predict and S.time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..harness.tables import Column, Table, field, numeric
from ..harness.values import NONE, Row, buffer_bytes, by, number, percent, plain, size, text
from .experiment import experiment_of
from .sentences import exposed_share, timed

# The backends here that correspond to the report's.
_SENT_BY = {"Gloo": ("Gloo", "XLA over Gloo", "XLA in-process"), "NCCL": ("NCCL", "XLA over NCCL")}
_WHY = field("why they differ", "why", is_wide=True)


@cache
def figures() -> dict[str, Any]:
    """The report's figures, as ``source.json`` has them."""
    return json.loads((Path(__file__).parent / "source.json").read_text())


def strategies_beside(rows: Sequence[Row]) -> Table | None:
    """Lays shares of exposed communication, and steps as ratios, beside those found here.

    Returns:
        The table; None if no row has a counterpart.
    """
    source = {one["strategy"]: one for one in figures()["strategies"]["rows"]}
    compared = _fewest_ranks(rows)
    lines: list[dict[str, Any]] = []
    for strategy, one in source.items():
        if "exposed_ms" in one:
            lines.append(
                {"figure": f"{strategy}: exposed share", "says": percent(one["says_exposed_ms"] / one["step_ms"]),
                 "right": percent(one["exposed_ms"] / one["step_ms"]), "why": one["why"],
                 "here": _by_framework(compared, partial(_share, strategy=strategy))}
            )  # fmt: skip
    for strategy, peer in (("flat", "naive"), ("overlapped", "naive"), ("zero1", "bucketed")):
        ratio = source[strategy]["step_ms"] / source[peer]["step_ms"]
        why = source[strategy]["why"] if strategy == "zero1" else "what communication costs beside computation"
        lines.append(
            {"figure": f"step of {strategy} / {peer}", "says": f"{ratio:.2f}", "right": f"{ratio:.2f}", "why": why,
             "here": _by_framework(compared, partial(_ratio, strategy=strategy, peer=peer))}
        )  # fmt: skip
    lines = [one for one in lines if one["here"]]
    columns = (
        field("figure"),
        field("the report says", "says"),
        field("right", "right"),
        field("here", "here"),
        _WHY,
    )
    return (
        Table(
            "Exposed communication as a share of the step, and ratios of steps",
            columns,
            lines,
            _machines("strategies", rows),
        )
        if lines
        else None
    )


def collectives_beside(rows: Sequence[Row]) -> Table | None:
    """Lays the report's all-reduces beside ours of the same size on as many ranks.

    Returns:
        The table; None if no row has a counterpart.
    """
    ours = [row for row in timed(rows) if text(row, "collective").replace("_", "-") == "all-reduce"]
    lines = [
        {"source": one, "here": row}
        for one in figures()["collectives"]
        for row in ours
        if buffer_bytes(row) == one["size_bytes"]
        and row.get("num_ranks") == one["num_ranks"]
        and text(row, "backend") in _SENT_BY[one["backend"]]
    ]
    columns = (
        Column("the report's backend", lambda row: text(row["source"], "backend")),
        Column("here", lambda row: f"{text(row['here'], 'framework')}, {text(row['here'], 'backend')}"),
        numeric("ranks", "source", "num_ranks", form=lambda value: f"{value:.0f}"),
        numeric("size", "source", "size_bytes", form=size),
        numeric("the report's call", "source", "mean_ms", unit="ms, mean"),
        numeric("call here", "here", "median_ms", unit="ms, median"),
        numeric("the report's busbw", "source", "busbw_gb_per_s", unit="GB/s"),
        numeric("busbw here", "here", "busbw_gb_per_s", unit="GB/s"),
    )
    note = (
        f"{_machines('collectives', rows)} Simulated devices copy within one memory and send nothing. The report says"
        " that NCCL gains least on small tensors; by its own numbers, with 4 and 6 ranks, it gains most there."
    )
    return Table("All-reduce of the same size on as many ranks", columns, lines, note) if lines else None


def buckets_beside(rows: Sequence[Row], optima: Sequence[Row]) -> Table | None:
    """Lays the report's bucket sizes, as ratios to the best of them, beside ours.

    Returns:
        The table; None if no row is of one of the report's sizes, and there is no optimum by formula.
    """
    source = figures()["buckets"]
    best_ms = min(one["step_ms"] for one in source["rows"])
    lines: list[dict[str, Any]] = []
    for one in source["rows"]:
        cap = one["bucket_mb"]
        lines.append(
            {"figure": f"step with {cap:g} MB / best", "says": f"{one['step_ms'] / best_ms:.3f}",
             "right": f"{one['step_ms'] / best_ms:.3f}", "why": one["why"],
             "here": _by_framework(timed(rows), partial(_to_best, cap=cap), key=_cap)}
        )  # fmt: skip
    found = [
        f"{text(row, 'framework')} {plain(value)} MiB".strip()
        for row in optima
        if (value := number(row, "uniform_optimum_mb")) is not None
    ]
    lines.append(
        {"figure": "best cap by formula", "says": f"{source['says_optimum_mb']:g} MiB", "right": source["optimum"],
         "here": ", ".join(dict.fromkeys(found)), "why": source["why"]}
    )  # fmt: skip
    lines = [one for one in lines if one["here"]]
    columns = (field("figure"), field("the report says", "says"), field("right", "right"), field("here", "here"), _WHY)
    return Table("Bucket sizes as ratios to the best", columns, lines, _machines("buckets", rows)) if lines else None


def _fewest_ranks(rows: Sequence[Row]) -> list[Row]:
    """Of each framework the sound rows with the number of ranks nearest to the report's, which is the least: 2."""
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
    """A sentence with a figure of each framework that has it."""
    found = []
    for framework, some in by(rows, lambda row: text(row, "framework")).items():
        said = of({key(row): row for row in reversed(some)})  # of several the shortest
        found += [f"{framework} {said}"] if said else []
    return ", ".join(found)


def _share(of: dict[Any, Row], strategy: str) -> str:
    share = exposed_share(of[strategy]) if strategy in of else None
    return "" if share is None else percent(max(share, 0.0))


def _ratio(of: dict[Any, Row], strategy: str, peer: str) -> str:
    return f"{of[strategy]['median_ms'] / of[peer]['median_ms']:.2f}" if strategy in of and peer in of else ""


def _cap(row: Row) -> Any:
    return number(row, "bucket_mb")


def _to_best(of: dict[Any, Row], cap: float) -> str:
    best = min((row["median_ms"] for row in of.values()), default=0)
    return f"{of[cap]['median_ms'] / best:.3f}" if cap in of and best else ""


def _machines(part: str, rows: Sequence[Row]) -> str:
    """The machines of the report and of these rows."""
    source = figures()[part] if isinstance(figures()[part], dict) else {}
    what = f"{source['model']}, {source['num_ranks']} ranks, NCCL, " if source else ""
    seen = by(rows, _where)
    here = "; ".join(words for words in seen if words) or NONE
    both = f"The assignment report: {what}{figures()['machine']}. Here: {here}."
    return f"{both} Shares and ratios go by how fast each computes beside how fast it sends."


def _where(row: Row) -> str:
    """The machine of a row, if it is recorded."""
    on = [text(row, "device"), text(row, "backend")]
    return ", ".join(filter(None, [*on, experiment_of(row).network if any(on) else ""]))
