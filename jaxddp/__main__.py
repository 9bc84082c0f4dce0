"""``python -m jaxddp COMMAND``: runs the command and reports errors in one line.

A command is a module with ``add_parser(commands)``, which adds an argparse parser whose default ``run`` is a function
``(arguments) -> int | None``, the exit status if it is not 0. Such a module imports slow modules only when it
runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import __version__
from .cli import inspect as inspect_cli
from .cli import launch as launch_cli
from .cli import plan as plan_cli
from .cli import train as train_cli
from .cli.interrupts import kept_interrupts
from .cli.parser import Parser

COMMANDS = (train_cli, inspect_cli, plan_cli, launch_cli)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: Those of the command line if None.

    Returns:
        The exit status: 0, 1 if a compiled program differs from its plan, 2 after bad input, 130 after an interrupt.
        Other exceptions are bugs and are not caught.
    """
    parser = Parser(
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
