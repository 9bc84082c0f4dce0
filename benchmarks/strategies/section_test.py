"""What is said of steps, and which of them are drawn."""

import re

from benchmarks.harness.tables import Table
from benchmarks.main.section import section as main_section
from benchmarks.report.conftest import of, step, steps, traces, unsound
from benchmarks.report.figure import Figure
from benchmarks.strategies.section import section as strategies_section


def test_sentences_of_the_main_job():
    section = main_section(steps() + unsound("main"))
    assert section.sentences == [
        "jaxddp, XLA in-process, 2 ranks: the step of zero3 is the shortest, 180 ms (p10–p90 171–189). The longest is"
        " that of naive, 300 ms (p10–p90 285–315): 1.667 times as long (by p10 and p90 1.508 to 1.842). Exposed"
        " communication is 2.2% of the step of zero3 and 13% of that of naive.",
        "torchref, Gloo, 2 ranks: the step of zero3 is the shortest, 210 ms (p10–p90 200–220). The longest is that of"
        " naive, 330 ms (p10–p90 314–346): 1.571 times as long (by p10 and p90 1.422 to 1.737). Exposed communication"
        " is 1.9% of the step of zero3 and 12% of that of naive.",
        "Of 17 rows 2 failed or are wrong and 1 was not run; no sentence here counts them.",
    ]


def test_bars_are_split_into_computation_and_exposed_communication():
    missing = of("jaxddp") | {"benchmark": "main", "strategy": "jit", "check": "not run: no GPU"}
    figure = main_section([*steps(), *unsound("main"), missing]).parts[0]
    assert figure.title == "One training step by strategy"
    assert [key.name for key in figure.legend] == ["step without communication", "exposed communication"]
    assert len(re.findall('<rect[^>]* class="a0"', figure.drawing.body)) == 14
    assert "<title>exposed communication: 40.0 ms</title>" in figure.drawing.body
    for words in ("✗ WRONG, see the table", "✗ FAILED, see the table", "not run, see the table"):
        assert words in figure.drawing.body


def test_a_step_that_is_not_split_is_a_bar_of_its_own_kind():
    figure = main_section([step("main", "jaxddp", "jit", 100.0)]).parts[0]
    assert [key.name for key in figure.legend] == ["step, not split"]
    assert figure.description == "jaxddp, XLA in-process, 2 ranks: jit 100 ms (p10–p90 95.0–105)."


def test_peers_are_compared_with_the_shortest_step_and_no_ratio_is_without_its_interval():
    ours, theirs = [180.0, 176.0, 184.0, 181.0, 179.0], [200.0, 196.0, 204.0, 201.0, 199.0]
    zero3, jit = (step("strategies", "jaxddp", name, 180.0) | {"num_timed": 5} for name in ("zero3", "jit"))
    apart = strategies_section([zero3 | {"rounds_ms": ours}, jit | {"rounds_ms": theirs}]).sentences
    alike = strategies_section([zero3 | {"rounds_ms": ours}, jit | {"rounds_ms": ours[::-1]}]).sentences
    assert (
        "jaxddp, XLA in-process, 2 ranks: the step of zero3 takes 0.900 times that of jit (95 % interval 0.898 to"
        " 0.902)." in apart
    )
    assert (
        "jaxddp, XLA in-process, 2 ranks: the step of zero3 cannot be told from that of jit (1.000 times, 95 % interval"
        " 0.972 to 1.028)." in alike
    )


def test_peers_without_rounds_are_compared_by_their_spreads():
    peers = [
        step("strategies", "torchref", "DistributedDataParallel", 250.0),
        step("strategies", "torchref", "fully_shard", 214.0),
        step("strategies", "jaxddp", "jit", 90.0) | {"p10_ms": None},
    ]
    said = strategies_section(steps("strategies") + peers).sentences
    assert (
        "torchref, Gloo, 2 ranks: the step of zero3 takes 0.840 times that of DistributedDataParallel (by p10 and p90"
        " 0.760 to 0.928) and cannot be told from that of fully_shard (0.981 times, by p10 and p90 0.888 to 1.085)."
        in said
    )
    assert (
        "jaxddp, XLA in-process, 2 ranks: the step of zero3 cannot be told from that of jit (no spread is known)."
        in said
    )


def test_sentences_are_of_the_most_ranks():
    more = [step("main", "jaxddp", name, 50.0, num_ranks=8) for name in ("naive", "flat")]
    said = main_section([one for one in steps() if one["framework"] == "jaxddp"] + more).sentences
    assert len(said) == 1 and said[0].startswith("jaxddp, XLA in-process, 8 ranks: ")


def test_timelines_stand_below_the_table_and_beside_each_other():
    parts = strategies_section(steps("strategies") + traces()).parts
    assert [type(part) for part in parts] == [Figure, Table, Figure, Figure, Figure, Figure, Table]
    assert not [one for one in parts[1].rows if "trace" in one]


def test_parts_that_failed_alone_still_make_a_section():
    section = main_section(unsound("main"))
    assert [type(part) for part in section.parts] == [Table]
    assert section.published is None


def test_a_time_on_the_device_has_a_column_and_what_is_missing_a_reason():
    timed = [step("strategies", "jaxddp", name, 100.0) for name in ("naive", "flat")]
    on_gpus = [one | {"device": "NVIDIA H100 80GB HBM3", "device_ms": 90.0} for one in timed]
    on_gpus[1] |= {"device_ms": None, "no_device_ms": "RuntimeError: no CUPTI"}
    section = strategies_section(on_gpus)
    (table,) = [part for part in section.parts if isinstance(part, Table)]
    (column,) = [column for column in table.filled() if column.name == "device"]
    assert [column.cell(row) for row in table.rows] == ["90.0", "not run"]
    assert "device, not run: RuntimeError: no CUPTI (jaxddp flat)" in section.notes
    section = strategies_section(timed)
    (table,) = [part for part in section.parts if isinstance(part, Table)]
    assert all(column.name != "device" for column in table.filled())
    assert "device: a step's time on its GPU; on CPUs there is none, since the host computes" in section.notes
