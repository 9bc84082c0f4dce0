"""``python -m torchref COMMAND``."""

import sys
from collections.abc import Sequence

from jaxddp.cli.parser import run_command

from .cli import train_program

COMMANDS = (train_program,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status is that of ``run_command``."""
    return run_command("torchref", "The PyTorch twin of jaxddp.", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
