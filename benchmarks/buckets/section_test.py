"""Bucket sizes: measured beside predicted."""

from benchmarks.buckets.section import cap_mb, section
from benchmarks.report.conftest import buckets, of, row, step
from benchmarks.report.figure import Figure


def test_what_was_measured_is_compared_with_what_was_predicted():
    said = section(buckets()).sentences[0]
    assert said.startswith("jaxddp, XLA in-process, 2 ranks: the step of bucketed 10 MiB is the shortest, 100 ms")
    assert (
        "4 of 5 predictions differ from what was measured by more than the spreads, most of all that of bucketed"
        " 1 MiB: 116 ms (standard deviation 1.50 ms) predicted, 146 ms (p10–p90 139–153) measured." in said
    )
    assert said.endswith(
        "The best cap is predicted as 5 MiB and measured as 10 MiB, with 25 MiB as good; the step is compute-bound."
    )


def test_predictions_that_the_spreads_do_not_tell_from_what_was_measured_are_not_said_to_be_off():
    near = [one | {"predicted_ms": 0.96 * one["median_ms"]} for one in buckets() if "median_ms" in one]
    assert "The spreads tell none of 5 predictions from what was measured." in section(near).sentences[0]
    noisy = [one | {"predicted_ms": 0.8 * one["median_ms"], "predicted_sd_ms": 30.0} for one in near]
    assert "The spreads tell none of 5 predictions from what was measured." in section(noisy).sentences[0]
    exact = [one | {"predicted_ms": 0.8 * one["median_ms"], "predicted_sd_ms": None} for one in near[:1]]
    said = section(exact).sentences[0]
    assert "1 of 1 prediction differs from what was measured by more than the spreads" in said
    assert "117 ms predicted, 146 ms (p10–p90 139–153) measured." in said


def test_measured_and_computed_curves():
    figures = [part for part in section(buckets()).parts if isinstance(part, Figure)]
    assert [figure.title for figure in figures] == [
        "Step by bucket size: jaxddp, XLA in-process, 2 ranks", "Step by bucket size: torchref, Gloo, 2 ranks",
    ]  # fmt: skip
    measured, *computed = figures[0].legend
    assert (measured.name, measured.is_dashed) == ("measured", False)
    assert [(key.name, key.is_dashed) for key in computed] == [("predicted", True), ("simulated", True)]
    assert 'class="marked"' in figures[0].drawing.body
    assert "the predicted best cap, 5 MiB" in figures[0].description


def test_an_optimum_is_of_its_own_framework():
    optimum = row("buckets", **of("torchref"), optimum_mb=7.0)
    figures = [
        part for part in section([*buckets(), optimum | {"check": "FAILED: x"}]).parts if isinstance(part, Figure)
    ]
    assert "7 MiB" not in figures[1].description
    only = [one for one in buckets() if "optimum_mb" not in one and one["framework"] == "jaxddp"]
    (figure,) = [part for part in section([*only, optimum]).parts if isinstance(part, Figure)]
    assert 'class="marked"' not in figure.drawing.body


def test_what_goes_into_predictions_is_no_step():
    shares = row("buckets", ready_shares={"w": 0.5}, forward_share=0.3) | {"part": "gradient shares"}
    assert len(section([shares, *buckets()]).parts[2].rows) == 10


def test_one_bucket_for_everything_is_as_large_as_the_model():
    assert cap_mb(step("buckets", "jaxddp", "bucketed", 1.0, None, None, params_bytes=3 * 2**20)) == 3.0
    assert cap_mb(row("buckets", params_bytes=3 * 2**20)) is None
