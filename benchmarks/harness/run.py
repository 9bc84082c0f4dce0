"""A run of a benchmark: its folder, its rows so far, and its parts.

A benchmark consists of parts; variants that are compared are timed within one part. The rows of a part are written when
it is done, all or none. So results survive later failures, a failed part is a row that names the reason, and a stopped
run continues with the missing parts.
"""

from __future__ import annotations

import functools
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

from jaxddp.environment import facts
from torchref.launch import RankError

from ..lab.network import network
from .job_hosts import job_fields
from .results import commit
from .steal_time import in_words, steal_share, ticks

METRICS = "metrics.jsonl"
NOT_RUN, FAILED = "not run: ", "FAILED: "


class NotRun(Exception):
    """Raised by a part that cannot run here; the message is the reason. Not a failure."""


class Run:
    """Collects the rows of one benchmark in a folder; ``rows`` starts with those of an earlier, stopped run."""

    def __init__(self, folder: Path, console: Console, benchmark: str) -> None:
        """Reads the rows that the folder holds."""
        self.folder, self.console, self.benchmark = folder, console, benchmark
        self._since = ticks()
        self.rows, broken = read_rows(folder / METRICS)
        for number in broken:
            console.print(f"{folder / METRICS}, line {number}: no JSON object, skipped", soft_wrap=True)

    def part(
        self, key: str, measure: Callable[[], Iterable[Mapping[str, Any]]], *, is_derived: bool = False
    ) -> list[dict[str, Any]]:
        """Measures a part, unless its rows exist, and writes its rows.

        Args:
            key: The part's name, unique within the benchmark.
            measure: Returns its rows; ``NotRun``, RankError, ValueError and OSError become a row that names the reason.
            is_derived: Whether it is computed from other parts, and again when a run is resumed.

        Returns:
            Its rows; each has a ``check``.
        """
        if not is_derived and self.has(key):
            self.console.print(f"{key}: was measured before", soft_wrap=True)
            return [row for row in self.rows if row.get("part") == key]
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

    def has(self, key: str) -> bool:
        """Whether a part was measured before, and nothing of it failed."""
        there = [row for row in self.rows if row.get("part") == key]
        return bool(there) and not any(is_failed(row) for row in there)

    def put(self, key: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Writes all rows of a part in place of its earlier ones: a part may grow while it is measured.

        Rows that were written before keep their time and commit.
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
        """Prints which rows of a part failed or were not run, and how much processor time was stolen."""
        for said in dict.fromkeys(row["check"] for row in rows):
            if said.startswith((NOT_RUN, FAILED)):
                self.console.print(f"{key}: {said}", soft_wrap=True, markup=False)
        if said := in_words(max((row.get("stolen_share", 0.0) for row in rows), default=0.0)):
            self.console.print(f"{key}: {said}; its times are longer for it", soft_wrap=True, markup=False)

    def keep_error(self, name: str, error: BaseException) -> str:
        """Writes an error to a file of its own, and returns its first line."""
        (self.folder / f"error-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.txt").write_text(f"{error}\n")
        return (str(error).splitlines() or [type(error).__name__])[0]


def is_failed(row: Mapping[str, Any]) -> bool:
    """Whether a row reports that its part failed."""
    return str(row.get("check", "")).startswith(FAILED)


def holds(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no row failed or is wrong; rows that were not run do not count."""
    return not any(str(row["check"]).startswith((FAILED, "WRONG", "MISSED")) for row in rows)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Reads a file of rows, and the numbers, from 1, of its lines that are no JSON object.

    Raises:
        ValueError: If it is no regular file: a named pipe would be waited for, a device read without end.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{str(path)!r} must be a file of rows, it is a folder, pipe or device")
    rows, broken = [], []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # the latter of deep nesting
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            broken.append(number)
    return rows, broken


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes all rows or, if interrupted or without space, none: the file stays as it was."""
    beside = path.with_suffix(".tmp")
    with beside.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
        lines.flush()
        os.fsync(lines.fileno())  # before the rename, or a crash could leave an empty file
    os.replace(beside, path)


def _envelope() -> dict[str, Any]:
    return {
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "measured_at": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        **network(),
        **job_fields(),
        "python": platform.python_version(),
        **_facts(),
    }


_facts = functools.cache(facts)
