"""The page: one file that loads nothing else and is readable on a phone, by keyboard and by screen reader."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..harness.run import METRICS
from ..harness.values import Row, by, check, counted, is_bad, is_not_run, listed
from .comparison import compare
from .environment import render_environment
from .figure import definitions
from .markup import Markup, join, tag
from .runs import RunRows, experiment_of, read_runs
from .section import Section, render_section
from .sections import is_known, order_of, section_of
from .steps import in_words

PAGE = "report.html"
_HERE = Path(__file__).parent
_MOST_FAULTS = 20


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Writes the page of one or more runs, each compared with the first.

    Raises:
        ValueError: If a run's folder is missing, has no row, or is named twice, or the path is a link.
    """
    if path.is_symlink():  # a run from elsewhere may point anywhere
        raise ValueError(f"path (={str(path)!r}) must not be a link: remove it, or write into another folder")
    page = render(read_runs(folders))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def render(runs: Sequence[RunRows]) -> str:
    """Renders the page of one or more runs."""
    title = f"Benchmarks: {listed([run.name for run in runs])}"
    style, script = (Markup((_HERE / name).read_text()) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Whatever the rows contain, nothing is fetched and only this page's script runs.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", style),
    )
    compared = [compare(runs[0], other) for other in runs[1:]]
    parts = [render_section(section, f"compared-{index}", 2) for index, section in enumerate(compared, 1)]
    entries = [_entry(f"compared-{index}", section.title) for index, section in enumerate(compared, 1)]
    for index, run in enumerate(runs, 1):
        prefix, level = (f"run-{index}-", 3) if len(runs) > 1 else ("", 2)
        written = [tag("h2", f"Run {run.name}", id=f"run-{index}")] if len(runs) > 1 else []
        sections = [(prefix + name, section) for name, section in _sections(run)]
        written += [_about(run, prefix, level), *(render_section(section, name, level) for name, section in sections)]
        of_run = [_entry(name, section.title) for name, section in sections]
        entries += [_entry(f"run-{index}", f"Run {run.name}", of_run)] if len(runs) > 1 else of_run
        parts.append(tag("article", *written) if len(runs) > 1 else join(*written))
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#results", class_="skip"),
        definitions(),
        tag("header", tag("h1", title), _summary(runs)),
        tag("nav", tag("ul", *entries), aria_label="Contents"),
        tag("main", *parts, id="results", tabindex="-1"),
        tag(
            "footer", tag("p", f"Made from the rows of {METRICS} alone. MiB are 2^20 bytes, GB/s 10^9 bytes a second.")
        ),
        tag("script", script),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _sections(run: RunRows) -> list[tuple[str, Section]]:
    """The sections of a run, each with its id."""
    experiments = run.experiments
    return [
        (one.id if is_known(one.benchmark) else f"benchmark-{number}", section_of(one, experiments[one]))
        for number, one in enumerate(sorted(experiments, key=order_of), 1)
    ]


def _entry(name: str, words: str, below: Sequence[Markup] = ()) -> Markup:
    """An entry of the table of contents."""
    link = tag("a", words, href=f"#{name}")
    return tag("li", link, tag("ul", *below) if below else None, class_="run" if below else None)


def _summary(runs: Sequence[RunRows]) -> Markup:
    """The list at the top of rows that failed, were not run or are wrong."""
    said = []
    for run in runs:
        rows = run.rows
        bad, missing = [row for row in rows if is_bad(row)], [row for row in rows if is_not_run(row)]
        words = f"{counted(len(rows), 'row')}, of which "
        words += f"{len(bad) or 'none'} failed, wrong or missed"
        words += f"; {len(missing)} could not be run" if missing else ""
        said.append(tag("p", f"{run.name}: {words}." if len(runs) > 1 else f"{words[:1].upper()}{words[1:]}."))
        said += [_list(some, kind) for some, kind in ((bad, "faults"), (missing, "missing")) if some]
    return join(*said)


def _list(rows: Sequence[Row], kind: str) -> Markup:
    def alike(row: Row) -> tuple[str, ...]:
        """Each fault has a line of its own; rows that were not run for the same reason share one."""
        same = experiment_of(row).label, check(row)
        return (*same, in_words(row)) if kind == "faults" else same

    lines = []
    for (experiment, why, *_), (first, *others) in by(rows, alike).items():
        also = f" and {counted(len(others), 'other row')}" if others else ""
        lines.append(f"{experiment}, {in_words(first)}{also}: {why}")
    if len(lines) > _MOST_FAULTS:
        lines[_MOST_FAULTS:] = [f"and {len(lines) - _MOST_FAULTS} more"]
    return tag("ul", *(tag("li", one) for one in lines), class_=kind)


def _about(run: RunRows, prefix: str, level: int) -> Markup:
    """The environment of a run, and the lines of its files that could not be read."""
    broken = [tag("li", f"{path}, line {number}: no JSON object, skipped") for path, number in run.broken]
    return tag(
        "section",
        tag(f"h{level}", "Environment", id=f"{prefix}environment-heading"),
        tag("ul", *broken, class_="faults") if broken else None,
        render_environment(run),
        id=f"{prefix}environment", aria_labelledby=f"{prefix}environment-heading",
    )  # fmt: skip
