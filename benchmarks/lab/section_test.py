"""The lab's links: what they carry, with its spread."""

from benchmarks.lab.section import section
from benchmarks.report.conftest import links, row


def test_what_a_link_carries_is_said_with_its_spread():
    made = section(links())
    assert made.sentences == [
        "link 1: TCP carries 957 Mbit/s (p10–p90 900–960) of the 1000 Mbit/s asked for, and a round trip takes"
        " 0.0500 ms (p10–p90 0.0475–0.0525)."
    ]
    measured, ran = made.parts
    assert [column.cell(measured.rows[0]) for column in measured.columns] == [
        "link 1", "1000", "957", "900–960", "0.0500", "0.0475–0.0525", "cubic", "ok",
    ]  # fmt: skip
    assert [column.cell(ran.rows[0]) for column in ran.columns] == ["buckets", "ok"]


def test_a_link_that_is_wrong_or_was_not_measured_is_in_a_table_alone():
    wrong = links()[0] | {"check": "WRONG: more than 10 % off"}
    failed = row("lab") | {"part": "link 2", "check": "FAILED: no route"}
    made = section([wrong, failed])
    assert made.sentences == ["Of 2 rows 2 failed or are wrong; no sentence here counts them."]
    assert [len(table.rows) for table in made.parts] == [1, 1]
    assert section([links()[0] | {"round_trip": "fast", "p10_mbit": None}]).sentences == []
