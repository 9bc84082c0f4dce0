import re
import struct

import pytest

from jaxddp.instruments.simulate import Simulation, Span
from jaxddp.instruments.timeline import ONE_LINE_LEGEND, draw, one_line
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


def test_one_line_shows_phases_what_they_hide_and_waits():
    assert one_line(overlapped(), 16) == "ffffbbbbBBBB#ooo"
    assert one_line(naive(), 50) == "f" * 10 + "b" * 20 + "#" * 12 + "o" * 8
    assert one_line(make_step(enumerate([("optimizer", 0, 1)]), [(0, 1)], 1), 10) == "OOOOOOOOOO"
    trailing = make_step(enumerate([("backward", 0, 5)]), [(5, 10)], 10)
    assert one_line(trailing, 10) == "bbbbb#####"


def test_one_line_is_as_wide_as_asked_and_explains_its_characters():
    for width in (10, 71, 72, 73, 999):
        assert len(one_line(naive(), width)) == width
    assert len(one_line(naive())) == 72
    assert set(one_line(naive()) + one_line(overlapped())) == set("fbBo#")
    assert all(f"{glyph} " in ONE_LINE_LEGEND for glyph in "fboFBO#")
    assert len(ONE_LINE_LEGEND) <= 120 and ONE_LINE_LEGEND.isascii()


def test_waits_shorter_than_a_column_are_not_lost():
    """A quarter of every column is waiting, which never is the most of it."""
    compute = enumerate([("backward", i, i + 0.75) for i in range(40)])
    line = one_line(make_step(compute, [(0, 40)], 40), 40)
    assert line == "BB#B" * 10


def test_what_has_ended_is_not_made_up_for_later():
    compute = enumerate([("forward", 0, 1.4), ("backward", 1.4, 9.3), ("optimizer", 9.68, 10)])
    assert one_line(make_step(compute, [(9.3, 9.68)], 10), 10) == "fbbbbbbbb#"


def test_png_has_its_size_and_its_colours(tmp_path):
    path = tmp_path / "steps.PNG"
    draw({"naive": naive()}, path)
    one_row = path.read_bytes()
    assert one_row[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", one_row[16:24])
    assert width == 2000 and 300 < height < 500
    draw({"naive": naive(), "overlapped": overlapped()}, path)
    assert struct.unpack(">II", path.read_bytes()[16:24])[1] == height + 224  # 1.12 inches at 200 dots


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


@pytest.mark.parametrize("name", ["steps.pdf", "steps", "png"])
def test_other_suffixes_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=rf"^path \(='.*{name}'\) must end in .png or .svg$"):
        draw({"naive": naive()}, tmp_path / name)


def test_nothing_to_show_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^simulations \(=\{\}\) must hold at least one to draw$"):
        draw({}, tmp_path / "steps.png")
    with pytest.raises(ValueError, match=r"^width \(=9\) must be at least 10 columns$"):
        one_line(naive(), 9)
    empty = Simulation((), 0.0, 0.0, 0.0, 0.0)
    for show in (one_line, lambda step: draw({"naive": naive(), "empty": step}, tmp_path / "steps.png")):
        with pytest.raises(ValueError, match=r"^step_s \(=0.0\) must be over 0: the program holds nothing"):
            show(empty)
    assert not list(tmp_path.iterdir())
