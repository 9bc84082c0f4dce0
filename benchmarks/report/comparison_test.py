"""Two runs compared: what is matched, and when a difference counts."""

import pytest

from benchmarks.harness.tables import Table
from benchmarks.report.comparison import NOT_COMPARED, SAME, compare, quantity_of
from benchmarks.report.conftest import buckets, collectives, gates, in_lab, links, memory, row, step, steps, timed
from benchmarks.report.runs import RunRows


def run(name, rows):
    return RunRows(name, rows)


def seen(first, second):
    tables = [part for part in compare(run("a", first), run("b", second)).parts if isinstance(part, Table)]
    return [(line["seen"], line.get("ratio")) for table in tables for line in table.rows]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((100, 0.05), (120, 0.05), "slower"),
        ((120, 0.05), (100, 0.05), "faster"),
        ((100, 0.05), (104, 0.01), SAME),  # within the first's spread
        ((100, 0.01), (104, 0.05), SAME),  # the first within the second's
        ((100, 0.05), (100, 0.05), SAME),
    ],
)
def test_a_difference_counts_outside_of_both_spreads(before, after, verdict):
    pair = [[row("main", strategy="naive", **timed(*times))] for times in (before, after)]
    assert seen(*pair) == [(verdict, pytest.approx(after[0] / before[0]))]


def test_rows_are_matched_by_what_they_are_about_in_any_order():
    assert {verdict for verdict, _ in seen(steps(), steps()[::-1])} == {SAME}
    assert len(seen(collectives(), collectives())) == len([one for one in collectives() if "median_ms" in one])
    assert seen([step("main", "jaxddp", "flat", 1.0)], [step("main", "jaxddp", "flat", 1.0, num_ranks=4)]) == []
    assert seen([step("main", "jaxddp", "x", 1.0, None, 4.0)], [step("main", "jaxddp", "x", 1.0, None, 5.0)]) == []


def test_what_is_wrong_is_not_compared():
    good = step("main", "jaxddp", "naive", 100.0)
    assert seen([good], [good | {"check": "WRONG: x"}]) == [(f"{NOT_COMPARED}: WRONG", None)]
    failed = {key: value for key, value in good.items() if not key.endswith("_ms")} | {"check": "FAILED: x"}
    assert seen([failed], [good]) == [(f"{NOT_COMPARED}: FAILED", None)]


def test_one_thing_measured_twice_in_a_run_has_no_counterpart():
    good = step("main", "jaxddp", "naive", 100.0)
    assert seen([good, good], [good]) == []


def test_gates_go_by_their_interval_and_bytes_by_themselves():
    assert quantity_of(gates()[0]) == (1.02, 0.98, 1.06, "")
    assert {verdict for verdict, _ in seen(gates(), gates())} == {SAME}  # one that was missed was measured
    more = [one | {"compiled": one["compiled"] | {"batch": 2**20}} for one in memory() if "compiled" in one]
    assert {verdict for verdict, _ in seen(memory(), more)} == {"more"}
    assert {verdict for verdict, _ in seen(more, memory())} == {"less"}


def test_what_ran_in_a_lab_is_compared_with_what_ran_over_links_of_its_rate():
    slower = [one | timed(2 * one["median_ms"]) for one in buckets() if "median_ms" in one]
    first = [*buckets(), *in_lab(buckets(), 100.0), *in_lab(buckets()), *links()]
    second = [*buckets(), *in_lab(slower), *in_lab(buckets(), 10.0), *links()]
    made = compare(run("a", first), run("b", second))
    tables = [part for part in made.parts if isinstance(part, Table)]
    assert [table.caption for table in tables] == ["a and b", "a and b, in a lab with links of 1000 Mbit/s"]
    verdicts = [[(line["benchmark"], line["seen"]) for line in table.rows] for table in tables]
    assert verdicts == [[("buckets", SAME)] * 10, [("buckets", "slower")] * 10 + [("lab", SAME)]]
    assert {line["first"].get("link_mbit") for line in tables[0].rows} == {None}
    figures = [part.title for part in made.parts if not isinstance(part, Table)]
    assert figures == ["b / a", "b / a, in a lab with links of 1000 Mbit/s"]
    assert made.sentences[:2] == [
        "Of 10 things measured in both, b against a: 10 no difference seen.",
        "In a lab with links of 1000 Mbit/s: of 11 things measured in both, b against a: 10 slower and 1 no difference"
        " seen.",
    ]
    assert made.sentences[-2:] == ["10 things in a alone.", "10 things in b alone."]


def test_links_are_compared_by_what_they_carry():
    link = links()[0]
    assert quantity_of(link) == (957.0, 900.0, 960.0, "Mbit/s")
    slow = link | {"rate_mbit": 600.0, "p10_mbit": 590.0, "p90_mbit": 610.0}
    assert seen([link], [slow]) == [("slower", pytest.approx(600 / 957))]
    assert compare(run("a", [link]), run("b", [slow])).sentences[1] == (
        "In a lab with links of 1000 Mbit/s: the largest difference: link 1, 0.63 times, slower: 957 Mbit/s (spread"
        " 900–960) in a, 600 Mbit/s (spread 590–610) in b."
    )


def test_sentences():
    slower = step("main", "jaxddp", "naive", 600.0, commit="fffffff")
    first = steps() + gates()
    second = [slower if (one["framework"], one["strategy"]) == ("jaxddp", "naive") else one for one in steps()]
    said = compare(run("a", first), run("b", second)).sentences
    assert said[0] == "Of 14 things measured in both, b against a: 1 slower and 13 no difference seen."
    assert said[1] == (
        "The largest difference: jaxddp, naive, XLA in-process, 2 ranks, 2.00 times, slower: 300 ms (spread"
        " 285–315) in a, 600 ms (spread 570–630) in b."
    )
    assert said[2] == "The runs differ in commit (0123abc / fffffff; 0123abc)."
    assert said[3] == "4 things in a alone."
    assert compare(run("a", steps()), run("b", gates())).sentences == ["Nothing was measured in both a and b."]
