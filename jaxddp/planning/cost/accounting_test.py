"""Every row of the accounting whose right value is a number has its check."""

import importlib
from pathlib import Path

import pytest

pytest.register_assert_rewrite("jaxddp.planning.cost.testdata")
testdata = importlib.import_module("jaxddp.planning.cost.testdata")
SUBJECTS = ("bucket", "collective", "handout", "measured", "memory", "scaling")
for subject in SUBJECTS:
    importlib.import_module(f"jaxddp.planning.cost.testdata.{subject}_rows")

ROWS = testdata.load_rows()

# Rows whose right value is a statement.
IN_WORDS = {
    "B.w_definition", "X.d", "H26.tp_a", "S1.avg", "S1.partition_consistency", "N.grad_mean", "N.divides",
}  # fmt: skip


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
