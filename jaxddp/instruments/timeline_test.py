import json
import re
from itertools import pairwise

import pytest

from jaxddp.instruments.simulate import Simulation, Span
from jaxddp.instruments.timeline import draw, write_trace
from jaxddp.scopes import METRICS_SCOPE

MIB = 2**20


def make_step(compute, communication, step_ms):
    """A step from (kind, start_ms, end_ms) of either lane."""
    spans = [Span(f"fusion.{i}", "compute", kind, start / 1e3, end / 1e3, 64) for i, (kind, start, end) in compute]
    spans += [
        Span(f"all-reduce-start.{i}", "communication", "all-reduce", start / 1e3, end / 1e3, MIB)
        for i, (start, end) in enumerate(communication)
    ]
    compute_s = sum(span.end_s - span.start_s for span in spans if span.lane == "compute")
    spans = tuple(sorted(spans, key=lambda span: span.start_s))
    return Simulation(spans, step_ms / 1e3, compute_s, 0.0, step_ms / 1e3 - compute_s)


def naive():
    compute = enumerate([("forward", 0, 10), ("backward", 10, 30), ("optimizer", 42.3, 50)])
    return make_step(compute, [(30, 36), (36, 42.3)], 50)


def overlapped():
    compute = enumerate([("forward", 0, 10), ("backward", 10, 20), ("backward", 20, 30), ("optimizer", 32.5, 40)])
    return make_step(compute, [(20, 26), (26, 32.5)], 40)


def svg_text(path):
    return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())


def draw_svg(tmp_path, simulations, **options):
    path = tmp_path / "steps.svg"
    draw(simulations, path, **options)
    return path


def test_the_same_steps_give_the_same_file(tmp_path):
    for name in ("steps.svg", "steps.png"):
        files = []
        for run in ("first", "second"):
            (tmp_path / run).mkdir(exist_ok=True)
            draw({"naive": naive(), "overlapped": overlapped()}, tmp_path / run / name, title="two steps")
            files.append((tmp_path / run / name).read_bytes())
        assert files[0] == files[1]
    assert b"<dc:date>" not in (tmp_path / "first" / "steps.svg").read_bytes()


def test_svg_says_what_each_row_is_and_what_it_costs(tmp_path):
    text = svg_text(draw_svg(tmp_path, {"naive": naive(), "overlapped 1 < 2": overlapped()}, title="costs $1 and $2"))
    assert {"costs $1 and $2", "naive", "50.0 ms", "exposed 12.3 ms", "40.0 ms", "exposed 2.5 ms"} <= set(text)
    assert text.count("2 all-reduces, 2.0 MiB per step") == 2
    assert text.count("compute") == text.count("communication") == 2
    for once in ("forward", "backward", "optimizer", "waiting (exposed)", "all-reduce", "backward ends"):
        assert text.count(once) == 1
    assert "overlapped 1 &lt; 2" in text


def test_legend_lists_what_is_there_and_the_loss_is_not_counted(tmp_path):
    loss = Span("ar", "communication", "all-reduce", 0.0, 1.0, 4, op_name=f"jit(step)/{METRICS_SCOPE}/psum")
    forward = Span("f", "compute", "forward", 0.0, 2.0, 64)
    text = svg_text(draw_svg(tmp_path, {"evaluate": Simulation((forward, loss), 2.0, 2.0, 1.0, 0.0)}))
    assert "all-reduce" in text and not any("per step" in line for line in text)
    assert not {"backward", "backward ends", "optimizer"} & set(text)


def test_every_collective_is_drawn_and_touching_operations_are_one_piece(tmp_path):
    """Of a thousand operations and forty collectives remain two phases, one wait and forty collectives."""
    compute = [("forward", i / 100, (i + 1) / 100) for i in range(500)]
    compute += [("backward", i / 100, (i + 1) / 100) for i in range(500, 1000)]
    communication = [(10 + i / 10, 10 + (i + 1) / 10) for i in range(40)]
    svg = draw_svg(tmp_path, {"naive": make_step(enumerate(compute), communication, 14)}).read_text()
    collections = re.findall(r'<g id="(?:Poly|FillBetweenPoly)Collection_\d+">(.*?)\n   </g>', svg, re.DOTALL)
    assert sorted(len(re.findall(r"<path |<use ", collection)) for collection in collections) == [1, 1, 1, 40]


def test_what_cannot_be_shown_is_refused(tmp_path):
    empty = Simulation((), 0.0, 0.0, 0.0, 0.0)
    for steps, name, said in (
        ({"naive": naive()}, "steps.pdf", r"^path \(='.*steps.pdf'\) must"),
        ({}, "steps.png", r"^simulations \(=\{\}\) must"),
        ({"naive": naive(), "empty": empty}, "steps.png", r"^step_s \(=0.0\) must be over 0"),
    ):
        with pytest.raises(ValueError, match=said):
            draw(steps, tmp_path / name)
    with pytest.raises(ValueError, match=r"^simulations \(=\{\}\) must"):
        write_trace({}, tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def make_layers(num_layers, seconds):
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


def test_durations_are_the_simulations_and_nothing_overlaps_within_a_thread(tmp_path):
    step = make_layers(3000, 1e-6 / 3)
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
