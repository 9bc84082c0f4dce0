"""Timelines: how much communication is hidden, on one axis of time."""

from benchmarks.report.conftest import row, traces
from benchmarks.traces.section import events_of, trace_figures, trace_sentences


def test_overlap_is_what_the_row_says_not_what_the_drawing_shows():
    said = trace_sentences(traces())
    assert said[0] == (
        "jaxddp naive: of 16 ms of communication in the traced step, 0% ran while something was computed."
    )
    assert said[1] == (
        "jaxddp overlapped: of 16 ms of communication in the traced step, 75% ran while something was computed."
    )


def test_phases_have_the_same_style_and_axes_the_same_length_in_all_timelines():
    naive, overlapped = trace_figures(traces())[:2]
    assert naive.legend == overlapped.legend
    assert [key.name for key in naive.legend] == ["forward", "backward", "optimizer", "all-reduce"]
    for figure in (naive, overlapped):
        assert figure.drawing.body.count(">80</text>") == 1
        assert figure.description.endswith("Lanes: device 0, network.")


def test_the_table_has_the_numbers():
    rows = list(trace_figures(traces())[0].table.rows)
    assert [one["phase"] for one in rows] == ["forward", "backward", "optimizer", "all-reduce"]
    assert rows[-1] == {
        "lane": "network", "phase": "all-reduce", "events": 2, "busy_ms": 16, "start_ms": 60, "end_ms": 78,
    }  # fmt: skip


def test_what_is_no_event_is_left_out():
    good = {"lane": "a", "phase": "forward", "start_ms": 0, "end_ms": 1}
    trace = [good, "text", {}, good | {"end_ms": -1}, good | {"start_ms": "0"}]
    assert len(events_of(row("strategies", trace=trace))) == 1
    assert trace_figures([row("strategies", trace=trace) | {"check": "FAILED: x"}]) == []
    assert "shows no communication" in trace_sentences([row("strategies", trace=[good])])[0]
