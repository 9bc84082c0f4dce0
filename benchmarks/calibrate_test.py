import pytest

from benchmarks import calibrate
from benchmarks.calibrate import cases, measure
from benchmarks.conftest import options
from benchmarks.ranks import Ranks


@pytest.mark.full
def test_a_step_is_predicted_and_taken_and_what_was_rehearsed_is_said():
    (case,) = cases(options(ranks=2, strategies=["zero1"], steps=1))
    (row,) = measure(case, print)
    assert row["check"] == "ok" and (row["device"], row["target"]) == ("cpu", "h100:2")
    assert "ratio" not in row and row["notes"] == [calibrate.REHEARSED.format(device="cpu", chip="h100")]
    assert 0 < row["predicted_ms"] < row["median_ms"]
    assert row["kernels"] > 10 < row["predicted_kernels"] and 0 < row["products_share"] < 1
    assert 0 < row["exposed_ms"] < row["span_ms"]
    (figure,) = calibrate.plot([row | {"case": case.name}])
    assert len(figure.axes[0].patches) == 2


FOUND = {"predicted_ms": 3.0, "predicted_state_bytes": 8, "median_ms": 4.0, "state_bytes": 8, "loss": 1.5}
H100 = {"device": "NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(
    ("measured", "check", "ratio"),
    [
        (H100, "ok", 0.75),
        ({"device": "cpu"}, "ok", None),
        ({"device": "cpu", "state_bytes": 12}, "WRONG: +4 bytes of state", None),
        ({"device": "cpu", "loss": float("nan")}, "WRONG: loss nan", None),
    ],
)
def test_times_are_compared_on_the_predicted_chip_alone_and_bytes_everywhere(monkeypatch, measured, check, ratio):
    def run(self, fn, setup, is_profiled=False, **options):
        if is_profiled:
            raise ValueError("the profiler does not start")
        return FOUND | measured

    monkeypatch.setattr(Ranks, "run", run)
    (case,) = cases(options())
    (row,) = measure(case, lambda text: None)
    assert (row["check"], row.get("ratio")) == (check, ratio)
    assert row["notes"][0] == "tiny f32 bucketed was not profiled: the profiler does not start"


def test_gpus_get_all_models_and_arithmetics(monkeypatch):
    monkeypatch.setattr(calibrate, "choose_ranks", lambda *args, **options: Ranks(2, "gpus"))
    monkeypatch.setattr(calibrate, "_chip_here", lambda: "h200")
    found = cases(options())
    assert len(found) == len(calibrate.MODELS) * 3
    assert {(case.setup.target, case.setup.batch_size) for case in found} == {("h200:2", 32)}
