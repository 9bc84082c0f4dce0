import re

import matplotlib

from jaxddp.instruments.simulate import Simulation, Span
from jaxddp.instruments.timeline import draw

NAIVE = Simulation(
    (
        Span("f", "compute", "forward", 0, 0.01), Span("b", "compute", "backward", 0.01, 0.03),
        Span("s", "communication", "all-reduce", 0.03, 0.0423), Span("o", "compute", "optimizer", 0.0423, 0.05),
    ),
    0.05, 0.0377, 0.0123, 0.0123,
)  # fmt: skip
SILENT = Simulation((Span("f", "compute", "forward", 0.0, 40e-3),), 40e-3, 40e-3, 0.0, 0.0)


def test_the_picture_says_what_each_row_is_and_what_it_costs(tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw({"naive": NAIVE, "silent 1 < 2": SILENT}, tmp_path / "steps.svg", title="costs $1 and $2")
    picture = (tmp_path / "steps.svg").read_text()
    text = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    assert {"costs $1 and $2", "naive", "50 ms, exposed 12.3 ms", "silent 1 &lt; 2", "all-reduce"} <= set(text)
    assert text.count("compute") == text.count("communication") == 2
    colors = re.findall(r'<path [^>]*clip-path[^>]*style="fill: (#\w+)', picture)
    assert colors == ["#56b4e9", "#0072b2", "#e69f00", "#009e73", "#56b4e9"]
