"""Both sides on ranks that are processes: from what each rank found to rows, and to predictions for buckets."""

import dataclasses
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from benchmarks.buckets.benchmark import bucket_rows, probe_sizes
from benchmarks.buckets.prediction import Shares
from benchmarks.harness.ranks import Ranks
from benchmarks.strategies.benchmark_test import BATCHES, NUM_BYTES, TOY, specs
from benchmarks.training import interleaving, jax_side, torch_side
from benchmarks.training.device_time import by_profiler
from benchmarks.training.device_time_test import is_operation
from benchmarks.training.frameworks import FRAMEWORKS
from benchmarks.training.measure import FORWARD_BACKWARD, StrategySpec, merge_ranks
from benchmarks.training.steps import step_rows
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.models import build
from jaxddp.training import clock
from torchref.launch import shared_pool

pytestmark = pytest.mark.full  # strategies/benchmark_test.py trains under both frameworks, JAX in one process


@pytest.fixture(scope="module")
def on_processes():
    """A run of JAX on processes, with all that benchmarks ask for; its setup, and what each process found."""
    caps = (*specs("bucketed", "jit"), StrategySpec("bucketed", 1000.0))
    setup = replace(TOY, ranks=Ranks(2, "processes"), strategies=caps, with_schedules=True)
    setup = replace(setup, probe_bytes=probe_sizes(NUM_BYTES), num_on_device=2)
    sides, events = zip(*setup.ranks.run_jax(run_recorded, setup), strict=True)
    return setup, sides, events


def run_recorded(ranks, setup):
    """Runs the side of JAX in a rank, and gives beside its result the steps and the ends of compilations in order."""
    events = []

    def stopwatch(*args, **options):
        events.append("step")
        if options["wait"] is not jax.block_until_ready:  # on GPUs a step is only enqueued when its call returns
            events.append("not waited for")
        return clock.stopwatch(*args, **options)

    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append("compiled") if "backend_compile" in name else None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interleaving, "stopwatch", stopwatch)
        patch.setattr(jax_side, "by_profiler", partial(by_profiler, is_on_device=is_operation))
        return jax_side.run(ranks, setup), events


@pytest.fixture(scope="module")
def shares():
    """When gradients are ready."""
    return jax_side.gradient_shares(TOY)


def test_shares_are_traced_without_a_device():
    code = (
        "from benchmarks.strategies.benchmark_test import TOY\n"
        "from benchmarks.training.jax_side import gradient_shares\n"
        "print(gradient_shares(TOY)[2])"
    )
    no_device = os.environ | {"JAX_PLATFORMS": "none_such"}
    result = subprocess.run([sys.executable, "-c", code], env=no_device, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.returncode) == (f"{NUM_BYTES}\n", 0), result.stderr


def test_nothing_compiles_from_the_first_timed_step_on(on_processes):
    setup, _, of_processes = on_processes
    for events in of_processes:
        steps = [place for place, event in enumerate(events) if event == "step"]
        first_timed = steps[len(steps) // len(setup.batches) * setup.num_warmup]
        assert "not waited for" not in events
        assert "compiled" in events[: steps[0]] and "compiled" not in events[first_timed : steps[-1]]


def test_ranks_that_are_processes_train_alike(on_processes):
    setup, of_processes, _ = on_processes
    side = merge_ranks(of_processes)
    rows = step_rows("jaxddp", setup, side)
    assert [(row["strategy"], row["check"]) for row in rows] == [("bucketed", "ok"), ("jit", "ok"), ("bucketed", "ok")]
    assert (rows[0]["kind"], rows[0]["backend"], rows[0]["num_ranks"]) == ("processes", "XLA over Gloo", 2)
    assert rows[0]["planned"] == rows[0]["compiled"] != []
    for row in rows:
        assert len(row["device_rounds_ms"]) == 2 and min(row["device_rounds_ms"]) > 0
    for label, measured in side.measured.items():
        of_ranks = [one.measured[label].seconds for one in of_processes]
        assert measured.seconds == [max(times) for times in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_from_ranks_to_predictions(framework, on_processes, shares, tmp_path):
    forward, ready, num_bytes = shares
    # Rows of 4: forward 2 * 4 * (10 * 16 + 16 * 5) FLOPs; the backward as many again, and 2 * 4 * 16 * 5 for the input
    # of the second matrix.
    assert forward == pytest.approx(240 / (240 + 240 + 80))
    assert list(ready) == ["down.weight", "norm.bias", "norm.weight", "up.weight"] and num_bytes == NUM_BYTES
    assert list(ready.values()) == sorted(ready.values()) and ready["up.weight"] == 1.0
    setup, of_ranks, _ = on_processes
    setup = replace(setup, strategies=tuple(spec for spec in setup.strategies if spec.name == "bucketed"))
    if framework == "torchref":
        np.savez(tmp_path / "initial.npz", **to_numpy(build("toy")[1]))
        initial = str(tmp_path / "initial.npz")
        of_ranks = shared_pool().run(torch_side.run, setup.ranks, setup, initial, num_ranks=2)
    side = merge_ranks(of_ranks)
    assert [len(seconds) for seconds in side.probes.values()] == [len(BATCHES) - 1] * 6
    # A toy's all-reduces take as long whatever their size: the fit is tried on made times.
    sending = [4 * (1e-3 + size / 1e6) for size in setup.probe_bytes]
    times = dict(zip(side.probes, [0.02, *sending, 0.02 + sending[-2] / 2], strict=True))
    assert list(times)[0] == FORWARD_BACKWARD
    side = dataclasses.replace(side, probes={label: [time] for label, time in times.items()})
    rows = bucket_rows(Shares(forward, ready), framework, setup, side)
    assert [row["num_buckets"] for row in rows] == [2, 1]
    for row in rows:
        assert not row["check"].startswith(("WRONG", "FAILED"))
        assert (row["alpha_us"], row["gb_per_s"]) == pytest.approx((1000, 1e-3))
        assert row["predicted_ms"] == pytest.approx(row["step_alone_ms"] + row["predicted_exposed_ms"])
        assert row["error_share"] == pytest.approx(row["predicted_ms"] / row["median_ms"] - 1)
        assert (row.get("is_async") is False) == ("simulated_ms" in row) == (framework == "jaxddp")
        assert ("simulated_sd_ms" in row) == (framework == "jaxddp") and row["num_resampled"] == 40
        if framework == "jaxddp":  # nothing of what is sent at once is hidden
            sent_ms = row["num_buckets"] * 1.0 + NUM_BYTES * 1e-3 + 1.0 + 4 * 1e-3  # and the loss
            assert row["simulated_exposed_ms"] == pytest.approx(sent_ms, rel=0.2)  # of what else the metrics send
    assert rows[1]["predicted_exposed_ms"] == pytest.approx(1.0 + NUM_BYTES * 1e-3)
    failing = dataclasses.replace(side, probes={label: [1 / (1 + place)] for place, label in enumerate(side.probes)})
    assert bucket_rows(Shares(forward, ready), framework, setup, failing)[0]["check"].startswith("not predicted: ")
