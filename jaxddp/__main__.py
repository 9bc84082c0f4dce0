"""``python -m jaxddp COMMAND``: runs the command and reports errors in one line.

A command is a module with ``add_parser(commands)``, which adds an argparse parser whose default ``run`` is a function
``(arguments) -> int | None``, the exit status if it is not 0. Such a module imports slow modules only when it
runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from . import __version__
from .cli import inspect as inspect_cli
from .cli import plan as plan_cli
from .cli import train as train_cli
from .cli.interrupts import kept_interrupts

COMMANDS = (train_cli, inspect_cli, plan_cli)


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        """Fills in the names of the strategies."""
        for action in self._actions:
            if "STRATEGIES" in (action.help or ""):
                action.help = str(action.help).replace("STRATEGIES", ", ".join(_strategy_names()))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line, without argparse's usage before it."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def _strategy_names() -> list[str]:
    """Names of the registered strategies, read from the files' text: importing them would start JAX."""
    if registry := sys.modules.get("jaxddp.registry"):
        return list(registry.STRATEGIES)
    folders = (Path(__file__).parent / name for name in ("ddp", "zero"))
    texts = (path.read_text() for folder in folders for path in sorted(folder.glob("*.py")))
    return [name for text in texts for name in re.findall(r"^@register\ndef (\w+)", text, re.MULTILINE)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: Those of the command line if None.

    Returns:
        The exit status: 0, 1 if a compiled program differs from its plan, 2 after bad input, 130 after an interrupt.
        Other exceptions are bugs and are not caught.
    """
    parser = _Parser(
        prog="python -m jaxddp", description="Data-parallel training that does what was planned.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"jaxddp {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    try:
        with kept_interrupts():
            status = parsed.run(parsed)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{' ' + str(interrupt) if str(interrupt) else ''}", file=sys.stderr)
        return 130
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
