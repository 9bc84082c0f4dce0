"""Efficiencies on constructed rows, the points of both modes, one of them on real ranks, and simulated targets."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from benchmarks.harness.options import Options
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.run import NotRun, Run
from benchmarks.scaling import benchmark as scaling
from benchmarks.scaling import simulation
from benchmarks.scaling.benchmark import Point, ScalingJob, describe, with_efficiency
from benchmarks.scaling.section import on_cores
from benchmarks.scaling.simulation import Beyond, beyond_of, simulate_beyond
from benchmarks.strategies.benchmark_test import TOY
from benchmarks.training import frameworks
from benchmarks.training.measure import Measured, SideResult, StepMetrics, StrategySpec
from jaxddp.checkpoint.weights import export_weights
from jaxddp.instruments.targets import TargetError
from jaxddp.models import SIZES, TransformerConfig
from jaxddp.planning.chips import target


def point(mode, num_ranks, median_ms, **others):
    row = {
        "framework": "jaxddp", "strategy": "bucketed", "bucket_mb": 4.0, "mode": mode, "how": "measured",
        "num_ranks": num_ranks, "median_ms": median_ms, "check": "ok",
        "rounds_ms": [median_ms * (1 + wobble / 100) for wobble in (-1, 1, -2, 2, 0)],
    }  # fmt: skip
    return row | others


def test_what_does_not_fit_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr("benchmarks.strategies.benchmark.free_bytes", lambda kind: 2**30)
    with pytest.raises(
        ValueError, match=r"^model \(=byte\) must fit into memory: .* on 2 ranks need at least .* GiB, 1.0 are"
    ):
        describe(Options(ranks=4))


def test_efficiency_is_of_the_fewest_ranks():
    strong = list(with_efficiency([point("strong", 1, 100), point("strong", 2, 60), point("strong", 4, 30)], []))
    assert [row["efficiency"] for row in strong] == pytest.approx([1.0, 100 / 120, 100 / 120])
    (weak,) = with_efficiency([point("weak", 2, 125)], [*strong, point("weak", 1, 100)])
    assert weak["efficiency"] == pytest.approx(0.8)
    assert 0.77 < weak["efficiency_low"] < 0.8 < weak["efficiency_high"] < 0.84
    assert "efficiency_low" not in strong[0]
    assert strong[1]["efficiency_low"] < 100 / 120 < strong[1]["efficiency_high"]


def test_what_is_wrong_or_another_is_no_base():
    (alone,) = with_efficiency([point("weak", 2, 125)], [point("weak", 1, 100, check="WRONG: x")])
    assert alone["efficiency"] == 1.0  # it is the fewest that is right
    others = [point("weak", 1, 9, framework="torchref"), point("weak", 1, 9, strategy="flat"), point("strong", 1, 9)]
    assert list(with_efficiency([point("weak", 2, 125)], others))[0]["efficiency"] == 1.0
    simulated = point("weak", 64, 10, how="simulated")
    del simulated["rounds_ms"]
    (found,) = with_efficiency([simulated], [point("weak", 1, 100), {"check": "FAILED: x", "part": "y"}])
    assert found["efficiency"] == 1.0 and "efficiency_low" not in found
    assert "efficiency" not in list(with_efficiency([{"check": "FAILED: x"}], []))[0]


def test_both_modes_share_the_most_ranks():
    job, described = describe(Options(ranks=4, batch_size=8, steps=1))
    sizes = {(one.setup.ranks.num, one.setup.global_batch): one.modes for one in job.points}
    assert sizes == {
        (1, 8): ("strong",), (1, 2): ("weak",), (2, 8): ("strong",), (2, 4): ("weak",), (4, 8): ("strong", "weak"),
    }  # fmt: skip
    assert "1, 2, 4 ranks" in described and "seed_xl on 8, 32, 128, 512 h100" in described
    three, _ = describe(Options(ranks=3, batch_size=6, steps=1))
    assert [one.setup.ranks.num for one in three.points] == [1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match=r"batch_size \(=6\) must be divisible by the number of ranks \(=4\)"):
        describe(Options(ranks=4, batch_size=6))
    with pytest.raises(ValueError, match="unknown strategy 'zero'"):
        describe(Options(strategies=("zero",)))


def test_targets_grow_to_the_largest():
    specs = [StrategySpec("bucketed", 4.0), StrategySpec("flat")]
    beyond = beyond_of(Options(quick=True), specs)
    assert [one.spec for one in beyond.targets] == ["h100:8", "h100:8x8"]
    assert beyond.specs == (StrategySpec("bucketed", 25.0), StrategySpec("flat"))
    assert [beyond.batch_size("weak", 8), beyond.batch_size("weak", 64)] == [128, 1024]
    assert [beyond.batch_size("strong", 8), beyond.batch_size("strong", 64)] == [128, 128]
    assert [one.num_devices for one in beyond_of(Options(target="v5p:128"), specs).targets] == [8, 32, 128]
    assert [one.spec for one in beyond_of(Options(target="a100:4"), specs).targets] == ["a100:4"]
    with pytest.raises(ValueError, match="unknown chip"):
        beyond_of(Options(target="z80:4"), specs)


@pytest.mark.full
def test_simulated_rows_say_so(monkeypatch):
    monkeypatch.setitem(SIZES, "micro", TransformerConfig(8, 4, width=4, num_layers=1, num_heads=1, hidden=4))
    monkeypatch.setattr(simulation, "MODES", ("weak",))
    beyond = Beyond("micro", (StrategySpec("bucketed", 25.0),), (target("h100:2"), target("h100:2x2")))
    rows = list(with_efficiency(list(simulate_beyond(beyond, Console(file=io.StringIO()))), []))
    assert [(row["mode"], row["num_ranks"], row["global_batch"]) for row in rows] == [
        ("weak", 2, 32), ("weak", 4, 64),
    ]  # fmt: skip
    for row in rows:
        assert (row["how"], row["check"], len(row["compiled"])) == ("simulated", "ok", 1)
        assert 0 < row["efficiency"] <= 1 and "p10_ms" not in row
    # Between hosts the same bytes take longer.
    assert rows[0]["efficiency"] == 1 > rows[1]["efficiency"] and rows[1]["exposed_ms"] > rows[0]["exposed_ms"]


def test_without_a_compiler_nothing_is_simulated(monkeypatch):
    def missing(target):
        raise TargetError("target 'h100:8' needs the CUDA compiler")

    monkeypatch.setattr(simulation, "check_installed", missing)
    beyond = beyond_of(Options(quick=True), [StrategySpec("flat")])
    with pytest.raises(NotRun, match="needs the CUDA compiler"):
        list(simulate_beyond(beyond, Console(file=io.StringIO())))


def test_a_run_is_made_of_its_points(tmp_path, monkeypatch):
    setup = replace(TOY, ranks=Ranks(1, "simulated"), strategies=(StrategySpec("bucketed"),))
    weights = {"w": np.ones(3, np.float32)}
    metrics = [StepMetrics(2.0, 1.0), StepMetrics(1.0, 1.0)]
    measured = {"bucketed": Measured([], [], metrics, metrics, 0.0, [0.1, 0.2, 0.3])}
    side = SideResult(1, "simulated", "one device", "XLA in-process", "cpu", {}, weights, weights, measured)

    def run_jax(setup, initial, show):
        export_weights(initial, weights)
        return side

    def refuse(*args):
        raise ValueError("not here")

    def missing(*args):
        raise NotRun("there is no compiler")
        yield

    monkeypatch.setattr(frameworks, "_run_jax", run_jax)
    monkeypatch.setattr(frameworks, "_run_torch", refuse)
    monkeypatch.setattr(scaling, "simulate_beyond", missing)
    this = Run(tmp_path, Console(file=io.StringIO(), width=200), "scaling")
    job = ScalingJob((Point(setup, ("strong", "weak")),), beyond_of(Options(quick=True), []))
    assert not scaling.run(this, job)  # a framework failed
    ours = [row for row in this.rows if row["part"] == "jaxddp 1 ranks, batch 8"]
    assert [(row["mode"], row["efficiency"], row["check"]) for row in ours] == [("strong", 1, "ok"), ("weak", 1, "ok")]
    assert ours[0]["rounds_ms"] == ours[1]["rounds_ms"] == [100, 200, 300]
    table = (tmp_path / "table.md").read_text()
    assert "| strong | jaxddp | bucketed | measured | 1 simulated | 8 |" in table
    assert "FAILED: not here" in table and "not run: there is no compiler" in table


def test_ranks_that_outnumber_the_cores_are_named():
    assert on_cores({"device": "cpu", "num_ranks": 4, "cores": 2}) == "4 on 2 cores"
    assert on_cores({"device": "cpu", "num_ranks": 2, "cores": 2}) == ""
    assert on_cores({"device": "h100", "num_ranks": 512, "cores": 2}) == ""
