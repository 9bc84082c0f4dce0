"""Collectives by size: sentences, curves and fits."""

from benchmarks.collectives.section import section
from benchmarks.report.conftest import collectives, of, row, timed
from benchmarks.report.figure import NUM_STYLES, Figure


def test_every_collective_has_a_figure_of_times_and_one_of_bandwidths():
    figures = [part for part in section(collectives()).parts if isinstance(part, Figure)]
    assert [figure.title for figure in figures[:3]] == [
        "all-reduce: time of a call", "all-reduce: bus bandwidth", "reduce-scatter: time of a call",
    ]  # fmt: skip
    assert len(figures) == 6
    assert len({figure.legend for figure in figures}) == 1  # a backend keeps its style
    assert [key.name for key in figures[0].legend] == [
        "jaxddp, XLA in-process, 2 ranks", "jaxddp, XLA in-process, 4 ranks", "torchref, Gloo, 2 ranks",
        "torchref, Gloo, 4 ranks",
    ]  # fmt: skip
    assert "jaxddp, XLA in-process, 2 ranks: 0.401 ms at 1 KiB, 105 at 100 MiB." in figures[0].description


def test_sentences_are_of_the_most_ranks():
    said = section(collectives()).sentences
    assert said[0] == (
        "jaxddp, XLA in-process, 4 ranks: the all-reduce of 1 KiB takes 0.802 ms (p10–p90 0.642–0.962), that of 100 MiB"
        " 211 ms (p10–p90 168–253), a bus bandwidth of 0.747 GB/s."
    )
    assert said[2].startswith("At 100 MiB the all-reduce of ") and said[2].endswith("do not tell them apart.")


def test_fits_have_a_table_of_their_own():
    poor = row("collectives", **of("jaxddp"), collective="reduce", alpha_us=None, gb_per_s=None) | {"check": "poor: x"}
    calls, fits = section([*collectives(), poor]).parts[-2:]
    assert len(calls.rows) == 60 and len(fits.rows) == 13
    assert fits.columns[0].cell(poor) == "reduce"


def test_a_fit_gives_the_rate_of_the_buffer_and_what_a_rank_sends_with_units_and_bounds():
    fits = section(collectives()).parts[-1]
    shown = [(column.name, column.unit) for column in fits.columns[5:-1]]
    assert shown == [
        ("latency", "μs"), ("95 % interval", "μs"), ("rate", "GB/s"), ("95 % interval", "GB/s"),
        ("a rank sends", "GB/s"), ("worst error", "of a call"),
    ]  # fmt: skip
    cells = {
        (one["collective"], one["num_ranks"]): [column.cell(one) for column in fits.columns[5:-1]]
        for one in fits.rows
        if one["framework"] == "jaxddp"
    }
    assert cells["all_reduce", 2] == ["400", "300–500", "1.90", "1.10–6.90", "1.90", "7.0%"]
    assert cells["all_gather", 2] == ["400", "300–500", "1.90", "1.10–6.90", "0.950", "7.0%"]  # half goes over the link
    assert cells["all_reduce", 4] == ["800", "600–1,000", "1.90", "at least 1.10", "2.85", "7.0%"]
    assert "bytes of the buffer / rate" in fits.note and "bus factor" in fits.note


def test_what_was_not_run_is_in_the_table_alone():
    missing = row("collectives", **of("jaxddp"), collective="reduce", asked_bytes=2**30) | {"check": "not run: 9 GiB"}
    made = section([missing])
    assert [type(part).__name__ for part in made.parts] == ["Table"]
    assert [column.cell(missing) for column in made.parts[0].columns][4] == "1 GiB"
    assert made.sentences == ["Of 1 row 1 was not run; no sentence here counts them."]


def test_more_curves_than_styles_are_dashed():
    rows = [
        row("collectives", **of("jaxddp", ranks), **timed(1.0), collective="reduce", size_bytes=2**10)
        for ranks in range(2, 2 + NUM_STYLES + 2)
    ]
    legend = section(rows).parts[0].legend
    assert [key.is_dashed for key in legend] == [False] * NUM_STYLES + [True] * 2
    assert len(set(legend)) == NUM_STYLES + 2
