import json
from itertools import pairwise

import pytest

from jaxddp.instruments.simulate import Simulation, Span
from jaxddp.instruments.timeline import write_trace


def make_step(num_layers, seconds):
    """Operations that touch, and collectives that touch beside them."""
    spans = []
    for i in range(num_layers):
        kind = "forward" if i < num_layers // 2 else "backward"
        spans.append(Span(f"fusion.{i}", "compute", kind, i * seconds, (i + 1) * seconds, 100 + i, op_name=f"jit/{i}"))
        start, end = (i + 0.25) * seconds, (i + 1.25) * seconds
        spans.append(Span(f"all-gather-start.{i}", "communication", "all-gather", start, end, 2**20))
    return Simulation(tuple(spans), (num_layers + 0.25) * seconds, num_layers * seconds, 0.0, 0.25 * seconds)


def written(tmp_path, simulations):
    write_trace(simulations, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_events_carry_what_the_spans_say(tmp_path):
    step = Simulation(
        (
            Span("fusion.1", "compute", "backward", 0.0, 2.5e-6, 64, op_name='jit(step)/"quoted"'),
            Span("all-reduce-start.3", "communication", "all-reduce", 1e-6, 4e-6, 2**20),
        ),
        step_s=4e-6,
        compute_s=2.5e-6,
        communication_s=3e-6,
        exposed_s=1.5e-6,
    )
    events = [event for event in written(tmp_path, {"bucketed": step}) if event["ph"] == "X"]
    assert events == [
        {
            "name": "fusion.1", "cat": "compute,backward", "ph": "X", "ts": 0.0, "dur": 2.5, "pid": 1, "tid": 1,
            "args": {"phase": "backward", "bytes": 64, "op_name": 'jit(step)/"quoted"'},
        },
        {
            "name": "all-reduce-start.3", "cat": "communication,all-reduce", "ph": "X", "ts": 1.0, "dur": 3.0, "pid": 1,
            "tid": 2, "args": {"kind": "all-reduce", "bytes": 2**20, "op_name": ""},
        },
    ]  # fmt: skip


def test_processes_and_threads_have_names_in_their_order(tmp_path):
    events = written(tmp_path, {"naive": make_step(2, 1e-6), "zero3": make_step(4, 1e-6)})
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    assert names[1, 0, "process_name"] == {"name": "naive"} and names[2, 0, "process_name"] == {"name": "zero3"}
    assert names[1, 0, "process_sort_index"] == {"sort_index": 1}
    for process in (1, 2):
        assert [names[process, thread, "thread_name"]["name"] for thread in (1, 2)] == ["compute", "communication"]
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert used == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_durations_are_the_simulations_and_nothing_overlaps_within_a_thread(tmp_path):
    step = make_step(3000, 1e-6 / 3)
    events = [event for event in written(tmp_path, {"naive": step}) if event["ph"] == "X"]
    assert len(events) == len(step.spans)
    compute_us = sum(event["dur"] for event in events if event["tid"] == 1)
    # Start and end are rounded to whole nanoseconds, once each: the error of a lane without gaps is that of its ends.
    assert compute_us == pytest.approx(step.compute_s * 1e6, abs=1e-3)
    for thread in (1, 2):
        lane = sorted((event["ts"], event["dur"]) for event in events if event["tid"] == thread)
        assert len(lane) == 3000
        # As Perfetto reads them: start and duration each to the nearest nanosecond.
        in_ns = [(round(start * 1e3), round(duration * 1e3)) for start, duration in lane]
        assert all(start + duration <= following for (start, duration), (following, _) in pairwise(in_ns))


def test_the_same_steps_give_the_same_file(tmp_path):
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for path in files:
        write_trace({"naive": make_step(9, 1e-6), "größer": make_step(3, 2e-6)}, path)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().isascii()


def test_nothing_to_write_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^simulations \(=\{\}\) must hold at least one to write$"):
        write_trace({}, tmp_path / "trace.json")
