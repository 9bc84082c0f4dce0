"""``python -m jaxddp COMMAND``."""

import sys
from collections.abc import Sequence

from .cli import (
    doctor as doctor_cli,
    inspect as inspect_cli,
    launch as launch_cli,
    plan as plan_cli,
    train as train_cli,
)
from .cli.parser import run_command

COMMANDS = (train_cli, inspect_cli, plan_cli, launch_cli, doctor_cli)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status is that of ``run_command``."""
    return run_command("jaxddp", "Data-parallel training that does what was planned.", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
