"""Lines to standard error, which all processes of a job may share. No framework is imported."""

import sys
from typing import TextIO


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Prints a line in one write: ``print`` makes two where Python is unbuffered, with other processes' between."""
    stream = stream or sys.stderr
    stream.write(f"{line}\n")
    stream.flush()
