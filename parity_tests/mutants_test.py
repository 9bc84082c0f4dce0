"""No mutant lives; each is still a change of the line that it is of."""

import pytest

from .mutants import MUTANTS, run_tests


@pytest.mark.parametrize("name", MUTANTS)
def test_each_is_a_program_of_a_line_that_is_there(name):
    mutant = MUTANTS[name]
    compile(mutant.source(), mutant.file, "exec")


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_none_lives(name, tmp_path):
    run = run_tests(MUTANTS[name], tmp_path)
    assert run.returncode == 1, f"{name} lives\n{run.stdout[-3000:]}{run.stderr[-3000:]}"  # 1: a test failed
