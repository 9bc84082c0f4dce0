"""A benchmark that has no view still has its rows."""

from benchmarks.report.conftest import in_lab, row, timed
from benchmarks.report.runs import Experiment
from benchmarks.report.sections import is_known, order_of, section_of


def test_the_table_has_what_rows_have_beside_their_envelope():
    rows = [row("races", speed=3.5, nested={"a": [1]}, line="all is well"), row("races", flag=True)]
    made = section_of(Experiment("races"), rows)
    (table,) = made.parts
    assert [column.name for column in table.columns] == ["part", "speed", "nested", "line", "flag", "check"]
    assert [column.cell(rows[0]) for column in table.columns] == [
        "2 ranks",
        "3.50",
        '{"a": [1]}',
        "all is well",
        "–",
        "ok",
    ]
    assert table.columns[4].cell(rows[1]) == "true"
    assert made.sentences == ["all is well"]


def test_times_are_summed_up():
    rows = [row("races", **timed(time)) | {"part": name} for name, time in (("a", 1.0), ("b", 2.0))]
    assert section_of(Experiment("races"), rows).sentences == [
        "The time of a is the shortest, 1.00 ms (p10–p90 0.950–1.05). The longest is that of b, 2.00 ms"
        " (p10–p90 1.90–2.10): 2.000 times as long (by p10 and p90 1.810 to 2.211)."
    ]


def test_many_fields_are_cut_and_named():
    table = section_of(Experiment("races"), [row("races", **{f"field{index}": index for index in range(30)})]).parts[0]
    assert len(table.columns) == 26
    assert table.note == "no room for " + ", ".join(f"field{index}" for index in range(24, 30))


def test_known_experiments_come_first():
    assert is_known("main") and not is_known("races")
    names = ("main", "gates", "compile", "races")
    places = [order_of(Experiment(*of)) for of in (*zip(names), ("main", 10.0), ("main", 1000.0), ("gates", 1000.0))]
    assert places == sorted(places) and len(set(places)) == len(places)
    assert order_of(Experiment("races")) == order_of(Experiment(""))


def test_the_title_names_the_lab():
    rows = in_lab([row("races")], 12.5)
    assert section_of(Experiment("races", 12.5), rows).title == "races, in a lab with links of 12.5 Mbit/s"
