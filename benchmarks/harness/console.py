"""Progress of a benchmark: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .values import short

NUM_PLAIN_LINES = 4
FILE_WIDTH = 180  # columns, enough for the widest table, that of memory


def make_console() -> Console:
    """Makes the console of standard output, wide enough for tables where that is a file."""
    # Explicit, because a CI job's environment can make rich write control codes to files. A process of Open MPI has a
    # terminal of 80 columns, wherever mpirun copies its output to.
    is_terminal = sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
    return Console(force_terminal=is_terminal, highlight=False, width=None if is_terminal else FILE_WIDTH)


@contextmanager
def progress_of(console: Console, title: str) -> Iterator[Callable[[int, Any], None]]:
    """Shows the messages of rank 0; yields the function that ``torchref.launch`` calls with rank and message."""
    with progress_of_all(console, title) as shown:
        yield shown[title]


@contextmanager
def progress_of_all(console: Console, *titles: str) -> Iterator[dict[str, Callable[[int, Any], None]]]:
    """Does what ``progress_of`` does for several at once, which may be called from threads of their own."""
    title_column = TextColumn("{task.description}")
    columns = [title_column, BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:

        def show(title: str, task: TaskID, rank: int, message: Any) -> None:
            if rank != 0:
                return
            kind, *content = message
            if kind == "doing":
                progress.update(task, description=f"{title}: {content[0]}")
                if not console.is_terminal:
                    console.print(f"{title}: {content[0]}")
            elif kind == "preview":
                medians_ms, done, total = content
                for label, median_ms in medians_ms.items():
                    console.print(f"{title} {label}: {short(median_ms)} ms, {done} of {total} rounds, not checked yet")
            elif kind == "progress":
                done, total = content
                progress.update(task, completed=done, total=total)
                if not console.is_terminal and done % max(1, total // NUM_PLAIN_LINES) == 0:
                    console.print(f"{title}: {done} of {total} rounds")

        yield {title: partial(show, title, progress.add_task(title, total=None)) for title in titles}
