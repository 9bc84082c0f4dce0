"""``python -m benchmarks report RUN [RUN ...]``: makes the page of a run again, or compares several runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxddp.cli.parser import Parser

from ..harness.results import new_run_folder
from .page import PAGE, write_report
from .runs import read_runs


def main(arguments: Sequence[str]) -> int:
    """Writes a page; returns the exit status, 2 after bad input."""
    parser = Parser(prog="python -m benchmarks report", description=(__doc__ or "").split(": ", 1)[1])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run; others are compared with the first")
    parser.add_argument(
        "--out", metavar="DIR", help="folder for the page (default: that of the run; of several a new one under runs/)"
    )
    parsed = parser.parse_args(arguments)
    folders = [Path(run) for run in parsed.runs]
    try:
        for run in read_runs(folders):  # before a folder is made
            for file, number in run.broken:
                print(f"{run.name}: {file}, line {number}: no JSON object, skipped", file=sys.stderr)
        is_in_run = len(folders) == 1 and parsed.out is None
        path = (folders[0] if is_in_run else new_run_folder(parsed.out, "report")) / PAGE
        write_report(folders, path)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"written to {path}")
    return 0
