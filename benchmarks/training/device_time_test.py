import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from benchmarks.training import device_time
from benchmarks.training.device_time import by_profiler, longest_span, ran_on_gpu, time_on_device
from benchmarks.training.training_test import TOY
from torchref.launch import shared_pool


def event(start, length):
    return SimpleNamespace(start_ns=start, duration_ns=length)


def test_a_step_lasts_from_the_first_event_to_the_end_of_the_last_on_the_slowest_gpu():
    events = [
        ("/device:GPU:0", "Stream #13(MatMul)", event(2e9, 1e9)),
        ("/device:GPU:0", "Stream #20(NCCL)", event(1e9, 3e9)),
        ("/device:GPU:1", "Stream #13(MatMul)", event(1e9, 1e9)),
        ("/device:GPU:1", "XLA Modules", event(0, 9e9)),  # repeats the others
        ("/host:CPU", "python", event(0, 9e9)),
    ]
    assert longest_span(events, ran_on_gpu) == 3.0
    with pytest.raises(ValueError, match="nothing on a device"):
        longest_span(events[-2:], ran_on_gpu)


def test_steps_of_jax_are_timed_by_a_profile_of_each(monkeypatch):
    monkeypatch.setattr(dist, "barrier", lambda: None)
    step = jax.jit(lambda x: x @ x)
    x = step(jnp.ones((256, 256))).block_until_ready()
    seconds = by_profiler(lambda: step(x), lambda plane, line: plane == "/host:CPU")
    assert 0 < seconds < 60

    def fail(*args, **options):
        raise RuntimeError("no cupti")

    taken = []
    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    with pytest.raises(RuntimeError, match="the profiler does not start: no cupti"):
        by_profiler(lambda: taken.append(step(x)))
    assert taken  # other ranks take the step too


class Event:
    """CUDA's, on this host's clock; the second rank's show 1 s more."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at + dist.get_rank())


def on_a_fake_gpu(ranks, setup):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        return time_on_device(ranks, setup)


def test_steps_of_torch_take_as_long_as_on_the_slowest_rank():
    setup = TOY.of(("torchref",))
    rows, _ = shared_pool().run(on_a_fake_gpu, setup.ranks, setup, num_ranks=2)
    assert [row["strategy"] for row in rows] == ["naive", "bucketed", "DistributedDataParallel"]
    for row in rows:
        assert row["check"] == "ok" and row["table"] == device_time.DEVICE and row["p10_ms"] > 1000
