"""Times on the device: of profiles with the planes of GPUs, of faked CUDA events, and of real profiles of CPUs."""

import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

from benchmarks.harness.jax_profile import ran_on_gpu, read_trace
from benchmarks.training.device_time import by_events, by_profiler, longest_span, time_on_device


def is_operation(one):
    """Whether XLA ran it; on CPUs that stands for what runs on a GPU's streams."""
    return "hlo_op" in dict(one.event.stats)


def plane(name, lines):
    """A plane as text of a protocol buffer: by line, starts and lengths in us; the line begins at 1 ms."""
    text = "".join(
        f'lines {{ name: "{line}" timestamp_ns: 1000000'
        + "".join(
            f" events {{ metadata_id: 1 offset_ps: {start * 10**6} duration_ps: {length * 10**6} }}"
            for start, length in events
        )
        + " }\n"
        for line, events in lines.items()
    )
    return f'planes {{ name: "{name}" event_metadata {{ key: 1 value {{ id: 1 name: "x" }} }} {text} }}\n'


def test_a_gpus_time_is_that_between_the_first_and_the_last_of_all_its_streams(tmp_path):
    profile = (
        plane("/host:CPU", {"python": [(0, 9000)], "Stream #1(host)": [(0, 9000)]})
        + plane(
            "/device:GPU:0",
            {"Stream #13(Compute)": [(200, 100), (700, 50)], "Stream #14(NCCL)": [(650, 300)], "Steps": [(0, 5000)]},
        )
        + plane("/device:GPU:1", {"Stream #13(Compute)": [(240, 100), (900, 10)]})
    )
    path = tmp_path / "one.xplane.pb"
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(profile))
    recorded = [one for one in read_trace(path) if ran_on_gpu(one)]
    assert {one.plane for one in recorded} == {"/device:GPU:0", "/device:GPU:1"} and len(recorded) == 5
    assert longest_span(recorded) == pytest.approx(750e-6)  # 200 to 950; GPU 1 took 670
    with pytest.raises(ValueError, match="recorded nothing on a device"):
        longest_span(one for one in recorded if one.plane == "/device:GPU:2")


def test_cuda_events_are_recorded_around_the_step_and_read_once_it_is_done(monkeypatch):
    seen = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            seen.append((self, "recorded"))

        def synchronize(self):
            seen.append((self, "done"))

        def elapsed_time(self, end):
            seen.append((self, end))
            return 12.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("idle"))
    assert by_events(lambda index: seen.append(index), 7) == 0.0125
    (begin, _), (end, _) = seen[1], seen[3]
    assert begin is not end
    assert seen == ["idle", (begin, "recorded"), 7, (end, "recorded"), (end, "done"), (begin, end)]


@pytest.fixture
def start():
    """Starts a step that takes a while."""
    step = jax.jit(lambda x: jnp.linalg.matrix_power(x, 50))
    x = jnp.ones((200, 200)) / 200
    jax.block_until_ready(step(x))
    return lambda index: step(x)


def test_the_profilers_time_is_within_that_of_the_clock(start, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    began = []
    seconds = by_profiler(start, 0, barrier=lambda: began.append(time.perf_counter()), is_on_device=is_operation)
    assert 0 < seconds < time.perf_counter() - began[0]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="recorded nothing on a device"):  # CPUs have no plane of a GPU
        by_profiler(start, 0, barrier=lambda: None)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_profiler_does_not_start_takes_the_step_with_the_others(start, monkeypatch):
    def refuse(*args, **options):
        raise OSError("no CUPTI")

    monkeypatch.setattr(jax.profiler, "start_trace", refuse)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: pytest.fail("it has not started"))
    seen = []
    with pytest.raises(RuntimeError, match="the profiler does not start: no CUPTI"):
        by_profiler(lambda index: seen.append(index) or start(index), 3, barrier=lambda: seen.append("barrier"))
    assert seen == ["barrier", 3]


def test_a_profiler_stops_though_the_step_fails():
    def fail(index):
        raise OSError("out of memory")

    for _ in range(2):  # a second profile could not start beside one that goes on
        with pytest.raises(OSError, match="out of memory"):
            by_profiler(fail, 0, barrier=lambda: None)
    assert not list(Path(tempfile.gettempdir()).glob("device-time-*"))


def test_rounds_are_counted_without_the_first_and_what_fails_once_is_left_out():
    seen, turns, left = [], [], iter([1.0, 2.0])

    def time_step(start, index):
        start(index)
        seen.append(index)
        return float(len(seen))

    starts = {"good": lambda index: None, "bad": lambda index: next(left)}

    def wait_for_turn():
        turns.append(len(seen))

    times, failed = time_on_device(
        starts, 3, 2, time_step, barrier=lambda: None, agree=lambda said: said, wait_for_turn=wait_for_turn
    )
    assert times == {"good": [3.0, 5.0, 6.0]} and failed == {"bad": "StopIteration: "}
    assert turns == [0, 2, 4, 5] and seen == [0, 0, 1, 1, 0, 1]
