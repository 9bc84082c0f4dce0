"""Every row of the accounting has its check, or the documents and tests that hold what it says in words."""

import importlib
import re
from pathlib import Path

import pytest

from jaxddp.__main__ import main

pytest.register_assert_rewrite("jaxddp.planning.cost.testdata")
testdata = importlib.import_module("jaxddp.planning.cost.testdata")
SUBJECTS = ("bucket", "collective", "handout", "measured", "memory", "scaling")
for subject in SUBJECTS:
    importlib.import_module(f"jaxddp.planning.cost.testdata.{subject}_rows")

ROOT = Path(__file__).parents[3]
FIGURES = "docs/source-figures.md"
ROWS = testdata.load_rows()

# Rows whose right value is a statement; docs/source-figures.md or the test of the formula in question makes it.
IN_WORDS = {
    "B.w_definition", "X.d", "H26.tp_a", "S1.avg", "S1.partition_consistency", "N.grad_mean", "N.divides",
}  # fmt: skip
NOT_SIMPLY_RIGHT = (
    "wrong", "bug", "inconsistent", "incomplete", "imprecise", "contradiction", "overstated", "missing", "unstated",
    "disagree", "two counts", "loose", "binary", "symbolic", "right (fp32)",
)  # fmt: skip


def test_every_row_is_covered_once():
    assert set(testdata.CHECKS) | IN_WORDS == set(ROWS)
    assert not set(testdata.CHECKS) & IN_WORDS
    assert {path.stem for path in Path(testdata.__file__).parent.glob("*_rows.py")} == {f"{s}_rows" for s in SUBJECTS}


@pytest.mark.parametrize("row_id", sorted(set(ROWS) - IN_WORDS))
def test_the_right_value_is_ours(row_id):
    testdata.CHECKS[row_id](ROWS[row_id])


def test_what_is_printed_is_compared_to_its_last_digit():
    for ours, printed in ((24.999, 25), (99.5661, 99.565), (0.9, None), ({"a": 1}, {"b": 1}), ([1.0], [1.0, 2.0])):
        with pytest.raises(AssertionError):
            testdata.check_printed(ours, printed)
    testdata.check_printed({"a": [25.0, 99.5655, None]}, {"a": [25, 99.565, None]})


def test_the_comparison_lists_every_row_that_is_not_simply_right():
    listed = re.findall(r"^\| (\w+\.\w+) \|", (ROOT / FIGURES).read_text(), re.MULTILINE)
    assert len(set(listed)) == len(listed) and set(listed) <= set(ROWS)
    judged = {row_id for row_id, row in ROWS.items() if any(word in row["verdict"] for word in NOT_SIMPLY_RIGHT)}
    assert judged <= set(listed)


def test_the_commands_of_the_comparison_give_what_they_say(capsys):
    commands = re.findall(r"python3 -m jaxddp (plan .*?)(?: {2,}([\d,]+).*)?$", (ROOT / FIGURES).read_text(), re.M)
    assert len(commands) == 6
    for command, tokens in commands:
        assert main([*command.split(), "--json"]) == 0
        assert f'"min_tokens": {tokens.replace(",", "") or 25302}, ' in capsys.readouterr().out
