import re

from jaxddp.instruments.simulate import Simulation, Span
from jaxddp.instruments.timeline import draw


def make_step(compute, communication, step_ms):
    """A step from (kind, start_ms, end_ms) of either lane."""
    spans = [Span("fusion", "compute", kind, start / 1e3, end / 1e3) for kind, start, end in compute]
    spans += [Span("start", "communication", kind, start / 1e3, end / 1e3) for kind, start, end in communication]
    compute_s = sum(span.end_s - span.start_s for span in spans if span.lane == "compute")
    spans = tuple(sorted(spans, key=lambda span: span.start_s))
    return Simulation(spans, step_ms / 1e3, compute_s, 0.0, step_ms / 1e3 - compute_s)


NAIVE = make_step(
    [("forward", 0, 10), ("backward", 10, 30), ("optimizer", 42.3, 50)],
    [("all-reduce", 30, 36), ("all-reduce", 36, 42.3)], 50,
)  # fmt: skip
SILENT = Simulation((Span("f", "compute", "forward", 0.0, 40e-3),), 40e-3, 40e-3, 0.0, 0.0)


def test_the_picture_says_what_each_row_is_and_what_it_costs(tmp_path):
    draw({"naive": NAIVE, "silent 1 < 2": SILENT}, tmp_path / "steps.svg", title="costs $1 and $2")
    text = re.findall(r"<text [^>]*>([^<]*)</text>", (tmp_path / "steps.svg").read_text())
    assert {"costs $1 and $2", "naive", "50 ms, exposed 12.3 ms"} <= set(text)
    assert "silent 1 &lt; 2" in text and text.count("compute") == text.count("communication") == 2
    for once in ("forward", "backward", "optimizer", "waiting (exposed)", "all-reduce", "backward ends"):
        assert text.count(once) == 1
