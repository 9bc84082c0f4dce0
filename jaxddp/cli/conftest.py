"""What tests of the commands have in common."""

import jax
import pytest

from jaxddp.__main__ import main


@pytest.fixture(autouse=True, scope="session")
def started():
    """JAX with its eight devices; before it starts, a run may still ask for more."""
    assert jax.device_count() == 8


def assert_refused(command, message, capsys):
    """A command ends with status 2 and one line, which begins with the message, and prints nothing else."""
    try:
        status = main(command.split())
    except SystemExit as ended:  # argparse's way
        status = ended.code
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1 and output.err.endswith("\n")
