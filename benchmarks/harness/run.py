"""A run of a benchmark: its folder, the rows that it has so far, and what becomes of a part that fails.

A benchmark is cut into parts, each measured as a whole: what is compared takes turns inside one part. The rows of a
part are written as soon as it is done, all of them or none. So what was measured stays whatever comes after, a part
that fails is a row that says so, and a run that was stopped goes on with the parts that are missing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from torchref.launch import RankError

from ..lab.network import network
from .results import commit, describe_machine
from .steal_time import in_words, steal_share, ticks

METRICS = "metrics.jsonl"
NOT_RUN, FAILED = "not run: ", "FAILED: "


class NotRun(Exception):
    """What a part raises that cannot be run here: its message is the reason, and no fault."""


class Run:
    """Collects the rows of one benchmark in one folder.

    Attributes:
        folder: Where everything is written.
        rows: What was measured so far, in the order of parts; those of an earlier, stopped run come first.
    """

    def __init__(self, folder: Path, console: Console, benchmark: str) -> None:
        """Takes up what the folder holds."""
        self.folder, self.console, self.benchmark = folder, console, benchmark
        self._since = ticks()
        self.rows, broken = read_rows(folder / METRICS)
        for number in broken:
            console.print(f"{folder / METRICS}, line {number}: no JSON object, skipped", soft_wrap=True)

    def part(
        self, key: str, measure: Callable[[], Iterable[Mapping[str, Any]]], *, is_derived: bool = False
    ) -> list[dict[str, Any]]:
        """Measures a part, unless its rows are there already, and writes its rows.

        Args:
            key: Its name, of its own within the benchmark.
            is_derived: Whether it is made of other parts, and has to be made anew when a run goes on.
            measure: Gives its rows; a RankError, ValueError or OSError, and ``NotRun``, become a row that says so.

        Returns:
            Its rows; each has a ``check``.
        """
        there = [row for row in self.rows if row.get("part") == key]
        if there and not is_derived and not any(is_failed(row) for row in there):
            self.console.print(f"{key}: was measured before", soft_wrap=True)
            return there
        self._since = ticks()
        try:
            rows = list(measure())
        except NotRun as reason:
            rows = [{"check": f"{NOT_RUN}{reason}"}]
        except (RankError, ValueError, OSError) as error:
            rows = [{"check": f"{FAILED}{self.keep_error(key, error)}"}]
        made = self.put(key, rows)
        self.say(key, made)
        return made

    def put(self, key: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Writes the rows of a part, in the place of those that it had: a part may grow while it is measured.

        Args:
            key: The part's name.
            rows: All of its rows; those that were written before keep when and by what they were measured.

        Returns:
            Them, as they were written.
        """
        envelope = {"benchmark": self.benchmark, "part": key, "stolen_share": steal_share(self._since)} | _envelope()
        self._since = ticks()
        made = [envelope | dict(row) for row in rows]
        if not all("check" in row for row in made):
            raise AssertionError(f"a row of part {key!r} has no check")
        kept = [row for row in self.rows if row.get("part") != key]
        _write(self.folder / METRICS, [*kept, *made])
        self.rows[:] = [*kept, *made]
        return made

    def say(self, key: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints what of a part failed or was not run, and how much of the machine it did not get."""
        for said in dict.fromkeys(row["check"] for row in rows):
            if said.startswith((NOT_RUN, FAILED)):
                self.console.print(f"{key}: {said}", soft_wrap=True, markup=False)
        if said := in_words(max((row.get("stolen_share", 0.0) for row in rows), default=0.0)):
            self.console.print(f"{key}: {said}; its times are longer for it", soft_wrap=True, markup=False)

    def keep_error(self, name: str, error: BaseException) -> str:
        """Writes all of an error to a file of its own.

        Returns:
            Its first line, for a row.
        """
        (self.folder / f"error-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.txt").write_text(f"{error}\n")
        return (str(error).splitlines() or [type(error).__name__])[0]


def is_failed(row: Mapping[str, Any]) -> bool:
    """Whether a row reports that its part failed."""
    return str(row.get("check", "")).startswith(FAILED)


def holds(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no row failed or is wrong; what was not run is no fault."""
    return not any(str(row["check"]).startswith((FAILED, "WRONG", "MISSED")) for row in rows)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Reads a file of rows.

    Returns:
        The rows, and the numbers, from 1, of lines that hold no JSON object.
    """
    rows, broken = [], []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            broken.append(number)
    return rows, broken


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes all rows or, killed or with a full disk in between, none: the file stays as it was."""
    beside = path.with_suffix(".tmp")
    with beside.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
        lines.flush()
        os.fsync(lines.fileno())  # or, when the machine goes down, the new name could have no content
    os.replace(beside, path)


def _envelope() -> dict[str, Any]:
    return {
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "measured_at": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        **describe_machine(),
        **network(),
        "python": platform.python_version(),
    }
