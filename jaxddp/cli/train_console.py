"""The output of ``train``: a progress bar in a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import math
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..communication.buckets import MIB
from ..instruments.schedule import describe_collectives
from .train_report import StepReport, TrainSummary

NUM_PLAIN_LINES = 20


class TrainConsole:
    """Shows one run; a context manager that keeps the progress bar alive."""

    def __init__(self, num_steps: int, file: TextIO | None = None, log: TextIO | None = None) -> None:
        """Prepares the output, to ``file`` or standard output; permanent lines go to ``log`` as well."""
        file = file or sys.stdout
        self._log = None if log is None else Console(file=log, force_terminal=False, highlight=False, markup=False)
        self.num_steps_taken = 0
        self._num_steps = num_steps
        # Explicit, because a CI job's environment can make rich write control codes to files.
        self._console = Console(file=file, force_terminal=file.isatty(), highlight=False, markup=False)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=self._console, transient=True, refresh_per_second=4, speed_estimate_period=600,
            disable=not self._is_live, expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task("compiling", total=None, status="")

    def __enter__(self) -> TrainConsole:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str | Text, only_log: bool = False) -> None:
        """Writes a permanent line."""
        for console in filter(None, (None if only_log else self._console, self._log)):
            console.print(text, soft_wrap=True)

    def on_step(self, report: StepReport) -> None:
        """Shows a step: moves the bar; writes a line after a validation, and about 20 per run without a bar."""
        self.num_steps_taken = report.step
        width = len(str(self._num_steps))
        step = f"step {report.step:{width}}/{self._num_steps}"
        status = f"loss {report.loss:.3f}  {report.tokens_per_s:,.0f} tokens/s"
        shown: Any = {"completed": report.step, "total": self._num_steps, "status": f"{status}  time left"}
        self._progress.update(self._task, description=step, **shown)
        every = math.ceil(self._num_steps / NUM_PLAIN_LINES)
        if report.step == 1 or report.step % every == 0 or report.validation_loss is not None:
            line = f"{step}  {status}"
            if report.validation_loss is not None:
                line += f"  validation {_nats_and_bits(report.validation_loss)}"
            self.say(line, only_log=self._is_live and report.validation_loss is None)  # there the bar shows it

    def show(self, summary: TrainSummary) -> None:
        """Writes the summary of a finished run."""
        options = summary.options
        found = "issued" if summary.compile_s is None else "compiled"
        compiled = "" if summary.compile_s is None else f"; compiled in {summary.compile_s:.1f} s"
        collectives = Text(f"planned {describe_collectives(summary.planned)}; {found}: ")
        if summary.as_planned:
            collectives.append("the same", style="green")
        else:
            collectives.append(f"{describe_collectives(summary.compiled)}, NOT AS PLANNED", style="bold red")
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
            ("step time", f"{summary.step_timings}{compiled}"),
            *([("skipped", f"{summary.num_skipped} steps, not finite")] if summary.num_skipped else []),
            ("throughput", f"{summary.tokens_per_s:,.0f} tokens/s ({options.batch_size} x {summary.context} per step)"),
        ]
        for name, value in rows:
            self.say(Text(f"{name:<12} ").append_text(Text.assemble(value)))


def _nats_and_bits(loss: float) -> str:
    return f"{loss:.3f} nats, {loss / math.log(2):.3f} bits per byte"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
