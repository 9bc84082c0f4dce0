"""Gates: which hold, and how near."""

from benchmarks.gates.section import gate_figure, gate_sentences, section
from benchmarks.report.conftest import gates, row


def test_what_was_missed_is_said():
    assert gate_sentences(gates()) == [
        "1 of 2 gates holds.",
        "torchref bucketed / DistributedDataParallel: 1.210, 95 % interval 1.170 to 1.250, limit 1.10 MISSED.",
    ]


def test_else_the_one_nearest_to_its_limit():
    first = gates()[0]
    assert gate_sentences([first, first | {"name": "far", "low": 0.5}]) == [
        "2 of 2 gates hold.",
        "jaxddp bucketed / jit with replicated parameters: 1.020, 95 % interval 0.980 to 1.060, limit 1.05.",
    ]


def test_what_is_not_judged_does_not_hold():
    first = gates()[0]
    unjudged = first | {"check": "not judged: limit in interval", "name": "near"}
    assert gate_sentences([first, unjudged])[:2] == ["1 of 2 gates holds.", "1 could not be judged."]
    assert "not judged: 1.020, limit 1.05" in gate_figure([unjudged]).drawing.body


def test_a_gate_without_a_limit_or_a_ratio():
    missing = row("gates", name="b", limit=1.05) | {"check": "not run: one of the two was not measured"}
    made = section([*gates(), missing])
    figure, table = made.parts[:2]
    assert "2.000, no limit" in figure.drawing.body
    assert len(table.rows) == 4 and figure.drawing.body.count("<circle") == 3
    assert gate_figure([missing]) is None
    assert gate_sentences([missing, gates()[2]]) == []


def test_steps_behind_the_ratios_follow():
    captions = [getattr(part, "caption", None) or part.title for part in section(gates()).parts]
    assert captions == ["Ratios of step times", "Ratios and their limits", "The steps behind the ratios", "Steps"]
