"""What a user sees of a training run: a progress bar in a terminal, plain lines elsewhere, a summary at the end."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..planning.buckets import MIB

if TYPE_CHECKING:
    from .train_loop import StepReport, TrainSummary

NUM_PLAIN_LINES = 20


class TrainConsole:
    """Shows one run; a context manager, inside of which the progress bar is alive."""

    def __init__(self, num_steps: int, file: TextIO | None = None) -> None:
        """Looks at where the output goes.

        Args:
            num_steps: Steps of the run.
            file: Where to write; standard output when None.
        """
        file = file or sys.stdout
        self.num_steps_taken = 0
        self._num_steps = num_steps
        # Set, not left to rich: the environment of a CI job may ask for control codes even in a file.
        self._console = Console(file=file, force_terminal=file.isatty(), highlight=False, markup=False)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            refresh_per_second=4,
            speed_estimate_period=600,
            disable=not self._is_live,
            expand=True,
        )
        self._task = self._progress.add_task("compiling", total=None, status="")

    def __enter__(self) -> TrainConsole:
        """Starts the progress bar, if the output is a terminal."""
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Takes the progress bar away."""
        self._progress.stop()

    def say(self, text: str) -> None:
        """Writes a line that stays."""
        self._console.print(text, soft_wrap=True)

    def on_step(self, report: StepReport) -> None:
        """Shows a step: the bar moves; a line stays after a validation, and now and then where there is no bar."""
        self.num_steps_taken = report.step
        width = len(str(self._num_steps))
        step = f"step {report.step:{width}}/{self._num_steps}"
        status = f"loss {report.loss:.3f}  {report.tokens_per_s:,.0f} tokens/s"
        self._progress.update(
            self._task,
            description=step,
            completed=report.step,
            total=self._num_steps,
            status=f"{status}  time left",
        )
        every = math.ceil(self._num_steps / NUM_PLAIN_LINES)
        is_due = not self._is_live and (report.step == 1 or report.step % every == 0)
        if report.validation_loss is not None or is_due:
            line = f"{step}  {status}"
            if report.validation_loss is not None:
                line += f"  validation {_nats_and_bits(report.validation_loss)}"
            self.say(line)

    def show(self, summary: TrainSummary) -> None:
        """Writes the summary of a finished run."""
        options = summary.options
        collectives = Text(f"planned {describe_collectives(summary.planned)}")
        if summary.as_planned:
            collectives.append("; compiled: the same", style="green")
        else:
            collectives.append(
                f"; compiled: {describe_collectives(summary.compiled)}, NOT AS PLANNED", style="bold red"
            )
        if summary.validation_loss is None:
            validation = f"none: fewer than batch_size (={options.batch_size}) windows are held out"
        else:
            validation = (
                f"{_nats_and_bits(summary.validation_loss)}, over {summary.num_validation_bytes:,} held-out bytes"
            )
        cap = "" if options.bucket_mb is None else f", buckets of at most {options.bucket_mb:g} MiB"
        first = f"{summary.first_loss:.3f} nats at step {summary.first_step}"
        rows: list[tuple[str, str | Text]] = [
            ("model", f"{options.model}: {summary.num_params:,} parameters, {_mib(summary.params_bytes)}"),
            ("optimizer", f"{options.optimizer}, learning rate {options.learning_rate:g}"),
            ("text", f"{summary.source}, {summary.num_bytes:,} bytes"),
            ("ranks", summary.devices),
            ("strategy", options.strategy + cap),
            ("collectives", collectives),
            ("loss", f"{first}, {summary.last_loss:.3f} at step {options.steps}"),
            ("validation", validation),
            ("step time", f"{summary.step_timings}; compiled in {summary.compile_s:.1f} s"),
            ("throughput", f"{summary.tokens_per_s:,.0f} tokens/s ({options.batch_size} x {summary.context} per step)"),
        ]
        if not self._is_live:
            for name, value in rows:
                self.say(f"{name:<12} {value}")
            return
        table = Table(box=box.ROUNDED, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        self._console.print(table)


def describe_collectives(collectives: list[tuple[str, int]]) -> str:
    """Counts collectives by kind.

    Example:
        >>> describe_collectives([("all-reduce", 2**20), ("all-reduce", 2**19)])
        '2 all-reduces, 1.5 MiB per step'
    """
    if not collectives:
        return "none"
    counts = Counter(kind for kind, _ in collectives)
    kinds = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items())
    return f"{kinds}, {_mib(sum(num_bytes for _, num_bytes in collectives))} per step"


def _nats_and_bits(loss: float) -> str:
    return f"{loss:.3f} nats, {loss / math.log(2):.3f} bits per byte"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
