"""Gates on constructed rows: what is compared with what, and what keeps a gate from being run."""

import numpy as np
import pytest

from benchmarks.gates.benchmark import BEST, describe, gate_rows
from benchmarks.harness.options import Options
from benchmarks.harness.ratios import compare


def row(framework, strategy, rounds_ms, check="ok"):
    bucket_mb = 25.0 if strategy in ("bucketed", "zero1", "zero2", "DistributedDataParallel") else None
    return {
        "framework": framework, "strategy": strategy, "bucket_mb": bucket_mb, "median_ms": float(np.median(rounds_ms)),
        "rounds_ms": rounds_ms, "check": check, "p10_ms": min(rounds_ms), "p90_ms": max(rounds_ms),
    }  # fmt: skip


def rows_of(**changes):
    noise = np.random.default_rng(0).normal(1, 0.01, (7, 20))
    times = {"flat": 95, "bucketed": 100, "zero1": 103, "zero2": 104, "jit": 100}
    rows = {name: row("jaxddp", name, list(times[name] * noise[index])) for index, name in enumerate(times)}
    rows["torch"] = row("torchref", "bucketed", list(80 * noise[5]))
    rows["ddp"] = row("torchref", "DistributedDataParallel", list(90 * noise[6]))
    rows.update(changes)
    return list(rows.values())


def test_each_is_compared_with_what_it_replaces():
    gates = {gate["name"]: gate for gate in gate_rows(rows_of())}
    ratios = {name: round(gate["ratio"], 1) for name, gate in gates.items()}
    assert ratios == {
        "jaxddp bucketed / jit with replicated parameters": 1.0,
        "jaxddp zero1 / jaxddp bucketed": 1.0,
        "jaxddp zero2 / jaxddp bucketed": 1.0,
        "torchref bucketed / DistributedDataParallel": 0.9,
        f"{BEST} / DistributedDataParallel": 1.1,
    }
    best = gates[f"{BEST} / DistributedDataParallel"]
    assert (best["ours"], best["limit"], best["check"], best["is_interleaved"]) == ("flat", 1.0, "MISSED", False)
    assert {gate["check"] for gate in gates.values() if gate is not best} == {"ok"}
    assert gates["torchref bucketed / DistributedDataParallel"]["limit"] == 1.05


def test_what_is_wrong_is_not_compared():
    wrong = row("jaxddp", "flat", [1.0] * 20, check="WRONG: weights differ")
    *_, best = gate_rows(rows_of(flat=wrong))
    assert best["ours"] == "bucketed 25 MiB"
    gates = list(gate_rows(rows_of(ddp={"framework": "torchref", "check": "FAILED: x"})))
    assert [gate["check"].split(":")[0] for gate in gates] == ["ok", "ok", "ok", "not run", "not run"]


@pytest.mark.parametrize("side", ["flat", "ddp"])
def test_frameworks_are_not_judged_where_the_host_kept_much_from_one(side):
    taken = rows_of()
    for one in taken:
        if one["strategy"] in (side, {"ddp": "DistributedDataParallel"}.get(side)):
            one["stolen_share"] = 0.4
    *others, best = gate_rows(taken)
    assert best["check"] == "not judged: 40% of the processors' time went to others by this machine's host"
    assert best["ratio"] > 1 and {gate["check"] for gate in others} == {"ok"}  # these took turns
    for one in taken:
        one["stolen_share"] = 0.03
    assert list(gate_rows(taken))[-1]["check"] == "MISSED"


def test_frameworks_that_took_turns_are_judged_in_pairs():
    drift = np.linspace(1, 2, 20)
    slow, fast = row("jaxddp", "flat", list(110 * drift)), row("torchref", "DistributedDataParallel", list(100 * drift))
    (best,) = (gate for gate in gate_rows([slow, fast]) if gate["name"].startswith(BEST) and "ratio" in gate)
    assert best["check"].startswith("not judged: interval too wide") and not best["is_interleaved"]
    in_turns = [one | {"in_turns": True, "stolen_share": 0.4} for one in (slow, fast)]
    (best,) = (gate for gate in gate_rows(in_turns) if gate["name"].startswith(BEST) and "ratio" in gate)
    assert best["check"] == "MISSED" and best["is_interleaved"]
    assert (best["low"], best["high"]) == pytest.approx((1.1, 1.1))


def test_verdicts_take_the_ratio_and_its_interval():
    rng = np.random.default_rng(1)
    theirs = list(1 + 0.02 * rng.random(40))
    slower = compare("slower", [1.2 * time for time in theirs], theirs, 1.05)
    assert slower.ratio == pytest.approx(1.2)
    assert 1.15 < slower.low <= slower.ratio <= slower.high < 1.25
    assert slower.verdict == "MISSED"
    noisy = compare("noisy", list(1.03 + 0.9 * (rng.random(40) - 0.5)), list(1 + 0.9 * (rng.random(40) - 0.5)), 1.05)
    assert noisy.low < 1.05 < noisy.high
    assert noisy.verdict == "not judged: interval too wide"
    near = compare("near", list(1.052 + 0.1 * (rng.random(40) - 0.5)), list(1 + 0.1 * (rng.random(40) - 0.5)), 1.05)
    assert near.low < 1.05 < near.ratio and near.verdict == "not judged: limit in interval"
    assert compare("same", theirs, theirs, 1.0).verdict == "ok"


def test_rounds_taken_together_are_compared_one_by_one():
    drift = np.linspace(1, 2, 30)
    together = compare("drift", list(1.1 * drift), list(drift), 1.0)
    assert (together.low, together.high) == pytest.approx((1.1, 1.1))
    apart = compare("drift", list(1.1 * drift), list(drift), 1.0, paired=False)
    assert apart.low < 1.05 < 1.15 < apart.high
    # Another job slows half of the rounds: a median of resampled times falls on either side.
    rng = np.random.default_rng(1)
    theirs = np.repeat([1.0, 2.0], 5) * (1 + 0.02 * rng.random(10))
    ours = np.repeat([1.02, 2.04], 5) * (1 + 0.02 * rng.random(10))
    half = compare("half", list(ours), list(theirs), 1.05)
    assert half.ratio == np.median(ours / theirs) and half.high - half.low < 0.03
    assert half.verdict == "ok"


def test_an_interval_takes_rounds():
    assert describe(Options(quick=True))[0].num_timed == 10
    with pytest.raises(ValueError, match=r"steps \(=9\) must be at least 10 rounds"):
        describe(Options(steps=9))
