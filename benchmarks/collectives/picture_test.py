"""The pictures hold what was measured, the source's figures beside it, and mark what was wrong."""

import matplotlib
import pytest

from benchmarks.collectives import picture
from benchmarks.collectives.picture import draw
from benchmarks.collectives.ratio import PAIRS, ratio, ratios, source_points, source_ratios

matplotlib.use("Agg")
SIZES = (2**20, 2**24)


def rows(name, backend, slower=1.0, num_ranks=2, check="ok"):
    """A call takes a ms per MiB, times ``slower``."""
    made = []
    for size in SIZES:
        median_ms = slower * size / 2**20
        made.append({
            "backend": backend, "num_ranks": num_ranks, "collective": name, "asked_bytes": size, "size_bytes": size,
            "median_ms": median_ms, "p10_ms": 0.9 * median_ms, "p90_ms": 1.2 * median_ms, "check": check,
            "busbw_gb_per_s": size / median_ms / 1e6, "rounds_ms": [median_ms * off for off in (0.9, 1, 1, 1, 1.2)],
        })  # fmt: skip
    return made


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, by file name, still open."""
    from matplotlib import pyplot

    saved = {}
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, **_: saved.setdefault(path.name, figure)
    )
    yield saved
    monkeypatch.undo()
    pyplot.close("all")


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_line_for_each_backend_and_the_sources_points(figures, tmp_path):
    measured = [*rows("all_reduce", "Gloo"), *rows("all_reduce", "XLA over Gloo", 2.0), *rows("broadcast", "Gloo")]
    measured += rows("all_reduce", "Gloo", num_ranks=4)
    assert draw(measured, tmp_path) == ["all_reduce.png", "broadcast.png", "ratios.png"]
    source = "Gloo, the source's machine (mean, standard deviation)"
    assert set(labels(figures["all_reduce.png"])) == {"Gloo", "XLA over Gloo", source}
    assert labels(figures["broadcast.png"]) == ["Gloo"]
    top, _, bottom, _ = figures["all_reduce.png"].axes
    assert top.get_title("left") == "all_reduce, 2 ranks"
    gloo = next(line for line in top.lines if line.get_color() == picture.COLORS["Gloo"])
    assert list(gloo.get_xydata()[:, 1]) == [1.0, 16.0]
    theirs = next(line for line in bottom.lines if line.get_marker() == "D")
    assert list(theirs.get_ydata()) == [one["busbw_gb_per_s"] for one in source_points("Gloo", 2)]


def test_a_wrong_result_is_a_red_cross_and_no_point_of_the_line(figures, tmp_path):
    measured = rows("all_reduce", "Gloo")
    measured[0]["check"] = "WRONG: 3 values"
    draw(measured, tmp_path)
    assert "Gloo: wrong result" in labels(figures["all_reduce.png"])
    top = figures["all_reduce.png"].axes[0]
    gloo = next(line for line in top.lines if line.get_color() == picture.COLORS["Gloo"])
    assert list(gloo.get_ydata()) == [16.0]


def test_bars_are_ratios_of_bandwidth_with_their_interval(figures, tmp_path):
    draw([*rows("all_reduce", "Gloo"), *rows("all_reduce", "XLA over Gloo", 2.0)], tmp_path)
    (axes,) = figures["ratios.png"].axes
    bars = {container.get_label(): container for container in axes.containers if container.get_label()[0] != "_"}
    ours = bars["XLA over Gloo / Gloo"]
    # From 1 down to a half, at both sizes.
    assert [bar.get_y() + bar.get_height() for bar in ours] == pytest.approx([0.5, 0.5])
    source = bars["NCCL / Gloo, the source's machine"]
    assert [bar.get_y() + bar.get_height() for bar in source] == pytest.approx([3.10, 3.30, 3.65, 3.89], abs=0.005)


def test_a_ratio_is_how_many_times_as_fast():
    value, low, high = ratio([10.0, 11.0, 12.0, 13.0, 14.0], [24.0] * 5)
    assert value == 2.0 and (low, high) == (24 / 14, 24 / 10)
    assert ratio([3.0] * 5, [3.0] * 5) == (1.0, 1.0, 1.0)


def test_ratios_are_of_right_results_of_the_same_size_and_ranks():
    ours, theirs = rows("all_reduce", "NCCL"), rows("all_reduce", "Gloo", 4.0)
    assert [(one.asked_bytes, one.value) for one in ratios([*ours, *theirs], ("NCCL", "Gloo"), 2)] == [
        (2**20, 4.0), (2**24, 4.0),
    ]  # fmt: skip
    ours[0]["check"] = "WRONG: 3 values"
    assert [one.asked_bytes for one in ratios([*ours, *theirs], ("NCCL", "Gloo"), 2)] == [2**24]
    assert ratios([*ours, *rows("all_reduce", "Gloo", num_ranks=4)], ("NCCL", "Gloo"), 2) == []
    assert ratios(theirs, PAIRS[0], 2) == []


def test_the_sources_ratios_have_a_deviation():
    first = source_ratios(("NCCL", "Gloo"), 6)[0]
    # 2.994 +- 0.278 ms over 0.599 +- 0.418 ms.
    assert first.value == pytest.approx(5.00, abs=0.005)
    assert first.high - first.value == pytest.approx(5.00 * (0.0929**2 + 0.698**2) ** 0.5, rel=0.01)  # as printed there
    assert source_ratios(("NCCL", "Gloo"), 3) == [] == source_points("XLA over Gloo", 2)
