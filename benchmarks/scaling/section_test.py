"""Scaling: efficiency by ranks, measured apart from simulated."""

from benchmarks.report.conftest import scaling
from benchmarks.scaling.section import section


def with_intervals(rows):
    low_high = {"efficiency_low": 0.4, "efficiency_high": 0.9}
    return [one | low_high if one["how"] == "measured" else one for one in rows]


def test_sentences_are_of_the_most_ranks_and_give_what_was_measured_its_interval():
    made = section(with_intervals(scaling()))
    assert made.sentences[:2] == [
        "Strong scaling to 8 ranks, measured, keeps: jaxddp bucketed 54% (95 % interval 40%–90%).",
        "Strong scaling to 8 ranks, simulated, keeps: jaxddp bucketed 81%.",
    ]
    assert made.parts[0].description == (
        "jaxddp, bucketed, measured: 54% (95 % interval 40%–90%) at 8 ranks."
        " jaxddp, bucketed, simulated: 81% at 8 ranks."
    )
    assert section(scaling()).sentences[0].endswith("keeps: jaxddp bucketed 54% (no spread is known).")


def test_the_fewest_ranks_keep_nothing():
    assert section([one for one in scaling() if one["num_ranks"] == 2]).sentences == ["", ""]


def test_each_mode_has_a_figure_and_what_is_simulated_is_dashed():
    strong, weak, table = section(scaling()).parts
    assert (strong.title, weak.title) == ("Efficiency, strong scaling", "Efficiency, weak scaling")
    assert [(key.name, key.is_dashed) for key in strong.legend] == [
        ("jaxddp, bucketed, measured", False), ("jaxddp, bucketed, simulated", True),
    ]  # fmt: skip
    assert len({key.style for key in strong.legend}) == 1
    assert len(table.rows) == 16


def test_intervals_and_ranks_that_outnumber_the_cores():
    rows = with_intervals(scaling())
    made = section(rows)
    assert [column.cell(rows[3]) for column in made.parts[2].columns][-3:-1] == ["40%–90%", "8 on 2 cores"]
    assert made.sentences[-2] == (
        "From 4 ranks on they take turns on 2 cores: what is measured there says nothing of a cluster."
    )
    assert section([one | {"cores": 64} for one in rows]).sentences[-2] == ""
    assert section([one for one in rows if one["how"] == "simulated"]).sentences[-2] == ""


def test_what_is_wrong_is_in_the_table_alone():
    made = section([one | {"check": "WRONG: x"} for one in scaling()])
    assert [type(part).__name__ for part in made.parts] == ["Table"]
