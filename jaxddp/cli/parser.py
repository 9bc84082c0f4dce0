"""Runs commands: modules with ``add_parser(commands)``, whose ``run(arguments)`` gives the exit status if not 0."""

import argparse
import gc
import io
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from .. import __version__
from ..processes.job import print_line
from ..processes.roll_call import ReplicaError
from ..processes.watchdog import leave

# What schedulers send before they end a job, and a terminal when it closes.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def noted_signals(is_in_job: bool) -> Iterator[list[int]]:
    """Gives the numbers of ``SIGNALS`` that come to the main thread, which do not end it; ignored ones stay so."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if is_in_job:  # JAX notes SIGTERM for all processes: multihost_utils.reached_preemption_sync_point
            signal.raise_signal(signal.SIGTERM)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS[1:] if is_in_job else SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(package: str, description: str, modules: Iterable[Any], arguments: Sequence[str] | None) -> int:
    """Runs a command of ``python -m package``, and gives its exit status; other exceptions are bugs, and not caught.

    It is 1 if ``doctor`` found what will not work, 2 after bad input, 3 after numbers that are not finite, 4 if ranks
    differed, 5 if another process was lost, 128 + the number of a signal; ``launch`` gives that of what failed.
    """
    parser = Parser(prog=f"python -m {package}", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{package} {__version__}")
    exact: Any = partial(Parser, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands", parser_class=exact)
    for module in modules:
        module.add_parser(commands)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # else a path that it cannot encode ends the run
    parsed = parser.parse_args(arguments)
    gc.set_threshold(100_000, 20, 100)  # JAX's callback of each collection swallows a Ctrl-C that comes meanwhile
    try:
        status = parsed.run(parsed)
    except (FloatingPointError, ReplicaError, ValueError, OSError) as error:
        line = f"error: {' '.join(str(error).split())}"
        print_line(line)
        status = {FloatingPointError: 3, ReplicaError: 4}.get(type(error), 2)
        leave(line, status)
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130
    return status or 0


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors; no value may be empty."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value == "":  # of a shell variable that is not set; as a path it would be the current folder
            raise argparse.ArgumentError(action, "must not be empty")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line, without argparse's usage before it."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")
