"""``python -m jaxddp COMMAND``."""

import sys
from collections.abc import Sequence

from .cli import doctor, inspect, launch, plan, train
from .cli.parser import run_command

COMMANDS = (train, inspect, plan, launch, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status is that of ``run_command``."""
    return run_command("jaxddp", "Data-parallel training that does what was planned.", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
