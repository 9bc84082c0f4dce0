"""Every row of the accounting has its check, or the documents and tests that hold what it says in words."""

import importlib
import re
from pathlib import Path

import pytest

from jaxddp.__main__ import main

pytest.register_assert_rewrite("jaxddp.cost.testdata")
testdata = importlib.import_module("jaxddp.cost.testdata")
SUBJECTS = ("bucket", "collective", "handout", "measured", "memory", "scaling")
for subject in SUBJECTS:
    importlib.import_module(f"jaxddp.cost.testdata.{subject}_rows")

ROOT = Path(__file__).parents[2]
FIGURES = "benchmarks/docs/source-figures.md"
ROWS = testdata.load_rows()

# Row -> (file, what it must hold).
IN_WORDS = {
    "B.w_definition": [(FIGURES, "algbw"), ("jaxddp/cost/overlap.py", "the buffer's bytes over the time")],
    "X.d": [
        (FIGURES, "K micro-batches of b tokens need K b as large"),
        ("jaxddp/cost/scaling_test.py", "def test_accumulation_does_not_lower_the_batch("),
        ("jaxddp/cost/split_test.py", "def test_what_lowers_the_batch("),
    ],
    "H26.tp_a": [("jaxddp/cost/workload_test.py", "def test_a_gated_block_cut_by_columns_takes_one_sum_each_way(")],
    "S1.avg": [(FIGURES, "divide by N"), ("jaxddp/strategy.py", "number of ranks when None, which gives the mean")],
    "S1.partition_consistency": [(FIGURES, "with two buckets or more it owns half of each")],
    "N.grad_mean": [
        (FIGURES, "where all ranks hold as many examples"),
        ("jaxddp/train_test.py", "def test_a_weighted_loss_is_divided_by_all_weights_at_once("),
    ],
    "N.divides": [
        (FIGURES, "d divides n"),
        ("jaxddp/train_cli_test.py", "must be divisible by devices x microbatches"),
    ],
}
# Values that are words although they hold numbers; the check recomputes what can be, this names who says it.
ALSO_SIMULATED = {
    "C.ring_ar": [("jaxddp/cost/collective_test.py", "def test_rings_by_brute_force(")],
    "C.ring_rs_ag": [("jaxddp/cost/collective_test.py", "def test_rings_by_brute_force(")],
    "C.alt_ring": [("jaxddp/cost/collective_test.py", "def test_the_alternate_ring_by_brute_force(")],
    "B.general": [("jaxddp/cost/overlap_test.py", "def test_the_best_number_of_buckets_by_brute_force(")],
    "Z.63": [("jaxddp/cost/traffic_test.py", "def test_gathers_by_brute_force(")],
    "T1.claims": [(FIGURES, "5.35 and 5.00 times at 1 MiB")],
}
NOT_SIMPLY_RIGHT = (
    "wrong", "bug", "inconsistent", "incomplete", "imprecise", "contradiction", "overstated", "missing", "unstated",
    "disagree", "two counts", "loose", "binary", "symbolic", "right (fp32)",
)  # fmt: skip


def test_every_row_is_covered_once():
    assert set(testdata.CHECKS) | set(IN_WORDS) == set(ROWS)
    assert not set(testdata.CHECKS) & set(IN_WORDS)
    assert set(ALSO_SIMULATED) <= set(testdata.CHECKS)
    assert {path.stem for path in Path(testdata.__file__).parent.glob("*_rows.py")} == {f"{s}_rows" for s in SUBJECTS}


@pytest.mark.parametrize("row_id", ROWS)
def test_the_right_value_is_ours(row_id):
    if row_id in testdata.CHECKS:
        testdata.CHECKS[row_id](ROWS[row_id])
    for file, said in (IN_WORDS | ALSO_SIMULATED).get(row_id, []):
        assert said in " ".join((ROOT / file).read_text().split()), (file, said)


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
