"""Sentences follow the numbers, and claim nothing that the spread does not bear out."""

from benchmarks.report.conftest import timed
from benchmarks.report.sentences import exposure, extremes, few_rounds, left_out


def named(name, median_ms, spread=0.05, **fields):
    return timed(median_ms, spread) | {"name": name, "check": "ok"} | fields


def name(row):
    return row["name"]


def test_the_shortest_and_the_longest_are_named():
    said = extremes([named("slow", 200.0), named("fast", 100.0), named("near", 103.0)], name, "step")
    assert said == (
        "the step of fast is the shortest, 100 ms (p10–p90 95.0–105); near cannot be told from it."
        " The longest is that of slow, 200 ms (p10–p90 190–210): 2.000 times as long (by p10 and p90 1.810 to 2.211)."
    )


def test_what_the_spread_does_not_tell_apart_no_sentence_does():
    said = extremes([named("slow", 110.0, 0.2), named("fast", 100.0, 0.2)], name, "step")
    assert said.endswith("but the spreads do not tell them apart.")
    assert "times as long" not in said


def test_rounds_go_before_spreads():
    few, other = [100.0, 99.0, 101.0, 140.0], [120.0, 119.0, 121.0, 90.0]
    said = extremes([named("a", 100.0, 0.01, rounds_ms=few), named("b", 120.0, 0.01, rounds_ms=other)], name, "step")
    assert said.endswith("but the spreads do not tell them apart.")
    drifting = [100.0, 110.0, 120.0, 130.0, 140.0]
    slower = [105.0, 115.5, 126.0, 136.5, 147.0]  # in every round, while both drift
    rows = [named("a", 120.0, 0.2, rounds_ms=drifting), named("b", 126.0, 0.2, rounds_ms=slower)]
    assert extremes(rows, name, "step").endswith(": 1.050 times as long (95 % interval 1.050 to 1.050).")


def test_what_is_wrong_or_was_not_run_is_not_counted():
    rows = [named("fast", 1.0, check="WRONG: x"), named("a", 100.0), named("b", 200.0), {"check": "not run: y"}]
    assert extremes(rows, name, "step").startswith("the step of a is the shortest")
    assert left_out(rows) == "Of 4 rows 1 failed or is wrong and 1 was not run; no sentence here counts them."
    assert extremes(rows[:2], name, "step") == left_out(rows[1:3]) == ""


def test_exposed_communication():
    rows = [named("a", 100.0, exposed_ms=-1.0), named("b", 200.0, exposed_ms=50.0)]
    assert exposure(rows, name) == "Exposed communication is 0% of the step of a and 25% of that of b."
    assert exposure(rows[:1], name) == "No step took longer than without its communication."
    assert exposure(rows[1:], name) == "25% of it is exposed communication."
    unsure = named("b", 200.0, exposed_ms=50.0, exposed_p10_ms=-5.0, exposed_p90_ms=90.0)
    assert exposure([unsure], name) == (
        "25% (p10–p90 -2.5% to 45%) of it is exposed communication, which its spread does not tell from none."
    )
    sure = named("a", 100.0, exposed_ms=10.0, exposed_p10_ms=8.0, exposed_p90_ms=12.0)
    assert exposure([sure, unsure], name).startswith("Exposed communication is 10% (p10–p90 8.0% to 12%) of the step")
    assert exposure([named("a", 100.0)], name) == ""


def test_few_rounds_are_warned_of():
    rows = [named("a", 1.0, num_timed=20), named("b", 1.0, num_timed=3)]
    assert few_rounds(rows) == "A time here is of 3 rounds: the spread of fewer than 10 proves little."
    assert few_rounds(rows[:1]) == few_rounds([named("a", 1.0)]) == ""
