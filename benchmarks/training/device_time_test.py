import time

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.training import device_time
from benchmarks.training.device_time import by_profiler, time_on_device
from benchmarks.training.training_test import TOY
from jaxddp.instruments.trace import read_trace
from torchref.launch import shared_pool


def test_steps_of_jax_are_timed_by_a_profile_of_each(monkeypatch):
    monkeypatch.setattr(dist, "barrier", lambda: None)
    step = jax.jit(lambda x: x @ x)
    x = step(jnp.ones((256, 256))).block_until_ready()
    seconds = by_profiler(lambda: step(x), "CPU")
    assert 0 < seconds < 60

    with pytest.raises(ValueError, match="nothing on a device"):
        by_profiler(lambda: step(x))

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


def profiled(folder):
    """Three reductions of each of two sizes on Gloo, and a product, under torch's profiler."""
    small, large, square = torch.ones(1000), torch.ones(2**20), torch.ones(64, 64)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for tensor in (small, large) * 3:
            dist.all_reduce(tensor)
            square @ square
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))


def test_a_profile_of_torch_shows_what_gloo_reduced(tmp_path):
    shared_pool().run(profiled, tmp_path, num_ranks=2)
    trace = read_trace(tmp_path)
    assert len(trace.devices) == 2
    found = [(one.kind, one.num_bytes, one.num_ranks, len(one.times_us)) for one in trace.collectives()]
    assert found == [("all-reduce", 4000, 2, 6), ("all-reduce", 2**22, 2, 6)]
    assert trace.kinds()["products"][0] >= 12  # of two ranks
    for one in trace.overlaps().values():
        assert 0 < one.exposed_us <= one.communication_us < one.span_us
