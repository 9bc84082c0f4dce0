from dataclasses import replace

import pytest

from benchmarks import gates, strategies
from benchmarks.conftest import options
from benchmarks.ranks import Ranks
from benchmarks.training import setup as module
from benchmarks.training.setup import StrategySpec, spec_of

OURS = ["naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3"]


def with_gpus(monkeypatch, count, free_gib=79.1):
    monkeypatch.setattr("benchmarks.ranks.num_gpus", lambda: count)
    monkeypatch.setattr(module, "free_bytes", lambda kind: int(free_gib * 2**30))


def test_the_main_job_is_small_and_strategies_have_peers():
    torch_case, jax_case = strategies.main_cases(options())
    setup = jax_case.setup
    assert (torch_case.name, jax_case.name, setup.frameworks) == ("torchref", "jaxddp", ("jaxddp",))
    assert (setup.model, setup.global_batch, setup.ranks) == ("byte_shallow", 4, Ranks(2, "simulated"))
    assert setup.must_learn
    assert len(strategies.main_cases(options(quick=True))[0].setup.batches) < len(setup.batches)
    of_random = strategies.main_cases(options(model="tiny", batch_size=8))[0].setup
    assert of_random.tolerance is None and not of_random.must_learn and of_random.global_batch == 8
    assert of_random.learning_rate < setup.learning_rate
    assert [spec.name for spec in setup.strategies["jaxddp"]] == OURS
    (case,) = strategies.strategies_cases(options(ranks=2))
    setup = case.setup
    assert setup.frameworks == ("jaxddp", "torchref") and setup.ranks.kind == "processes"
    assert [spec.name for spec in setup.strategies["jaxddp"]] == [*OURS, "jit"]
    peers = ["DistributedDataParallel", "ZeroRedundancyOptimizer", "fully_shard"]
    assert [spec.name for spec in setup.strategies["torchref"]] == [*OURS, *peers]
    assert StrategySpec("bucketed", 4.0) in setup.strategies["jaxddp"]  # several buckets
    assert spec_of("bucketed", "lm_9m").bucket_mb == 25.0 and spec_of("jit", "lm_9m").bucket_mb is None


def test_on_gpus_what_fills_them_is_trained(monkeypatch):
    with_gpus(monkeypatch, 4)
    (case,) = strategies.strategies_cases(options(dtype="tf32", strategies=["bucketed", "torch.compile"]))
    setup = case.setup
    assert (setup.model, setup.ranks, setup.global_batch, setup.dtype) == ("seed_xl", Ranks(4, "gpus"), 64, "tf32")
    assert "TF32" in module.in_words(setup) and "true float32" in module.in_words(replace(setup, dtype="f32"))


def test_frameworks_that_do_not_fit_into_a_gpu_together_take_it_one_after_the_other(monkeypatch):
    with_gpus(monkeypatch, 2)
    cases = strategies.strategies_cases(options())
    assert [case.name for case in cases] == ["torchref", "jaxddp"]
    of_torch, of_jax = (case.setup for case in cases)
    params = 171_098_880 * 4
    # Runs: 7 strategies and their baselines, the peers, one of the peers' baselines, and single-process training.
    assert (of_jax.num_runs, of_torch.num_runs) == (2 * 7 + 1 + 1, 2 * 7 + 4 + 1 + 1)
    assert of_jax.needed_bytes == 4 * 16 * params + 1.5 * 2**30
    # JAX takes three quarters of a card.
    with_gpus(monkeypatch, 2, free_gib=44)
    with pytest.raises(ValueError, match=r"16 training runs .* 33\.0 are free"):
        strategies.strategies_cases(options(strategies=[*OURS, "jit"]))


def test_one_gpu_takes_no_step_without_communication_since_none_has_any(monkeypatch):
    with_gpus(monkeypatch, 1)
    (case,) = strategies.strategies_cases(options())
    assert (case.name, case.setup.num_runs) == ("jaxddp and torchref", 9 + 12)
    monkeypatch.setattr(Ranks, "run", lambda self, *arguments, **options: [{}])
    assert [row["notes"] for row in strategies.measure_steps(case, print)] == [[strategies.ONE_RANK]]


def step(framework, label, ms, **more):
    rounds = [ms * (1 + 0.001 * index) for index in range(20)]
    row = {"framework": framework, "label": label, "strategy": label.split()[0], "median_ms": ms, "rounds_ms": rounds}
    return row | {"check": "ok", "case": "both", "num_rounds": 20, "p10_ms": ms, "p90_ms": ms} | more


def test_a_gate_is_judged_where_both_sides_took_turns():
    rows = [
        step("jaxddp", "bucketed 25 MiB", 100.0), step("jaxddp", "jit", 90.0), step("jaxddp", "zero1 25 MiB", 104.0),
        step("jaxddp", "flat", 50.0, check="WRONG: weights"), step("torchref", "bucketed 25 MiB", 100.0),
        step("torchref", "DistributedDataParallel 25 MiB", 120.0),
    ]  # fmt: skip
    found = list(gates.judge(rows))
    checks = [row["check"] for row in found]
    assert checks == ["MISSED", "ok", "not run: one of the two was not measured, or is wrong", "ok", "ok"]
    assert found[0]["ratio"] == pytest.approx(100 / 90) and found[4]["ours"] == "bucketed 25 MiB"  # not the wrong one
    apart = [row | {"case": row["framework"]} for row in rows]
    assert [row["check"] for row in gates.judge(apart)][4] == "not judged: the two did not take turns"


def test_caps_are_of_the_strategies_that_take_one():
    (case,) = strategies.strategies_cases(options(ranks=2, strategies=["naive", "bucketed"], bucket_mb=[5.0, 1.0]))
    specs = [StrategySpec("naive"), StrategySpec("bucketed", 1.0), StrategySpec("bucketed", 5.0)]
    assert list(case.setup.strategies["jaxddp"]) == list(case.setup.strategies["torchref"]) == specs
