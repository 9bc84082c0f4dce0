"""Overlap by its definition, profilers' events on constructed numbers, and the traces of real ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch.autograd import DeviceType

from benchmarks.harness.intervals import Event, merge
from benchmarks.harness.ranks import Ranks
from benchmarks.strategies.benchmark_test import TOY
from benchmarks.traces import jax_side, torch_side
from benchmarks.traces.overlap import COMMUNICATION, COMPUTE, SYNC, overlap_of, overlap_share, shorten
from benchmarks.traces.parts import trace_fields
from benchmarks.training.measure import TrainingSetup
from jaxddp.instruments.schedule import Operation, Schedule
from jaxddp.instruments.work import MatmulKind, Work
from jaxddp.training.data import RandomTokens
from torchref.launch import shared_pool

PHASES = ("forward", "loss", "backward", "optimizer")


@pytest.mark.parametrize(
    ("communication", "compute", "share"),
    [
        ([(0, 4)], [(4, 9)], 0.0),
        ([(0, 4)], [(0, 9)], 1.0),
        ([(0, 4)], [(1, 2), (3, 7)], 0.5),
        ([(0, 4), (1, 3), (2, 4)], [(1, 2), (1, 2)], 0.25),  # side by side counts once
        ([(0, 1), (9, 10)], [(0, 0.5), (9.5, 11)], 0.5),
        ([], [(0, 1)], None),
    ],
)
def test_overlap_is_of_merged_intervals(communication, compute, share):
    assert overlap_share(communication, compute) == share


def test_overlap_on_a_grid():
    rng = np.random.default_rng(0)
    for _ in range(50):
        ours, theirs = (
            [(start, start + length) for start, length in rng.integers([0, 1], [90, 10], (6, 2)).tolist()] for _ in "ab"
        )
        cells = [np.zeros(100, bool), np.zeros(100, bool)]
        for each, intervals in zip(cells, (ours, theirs), strict=True):
            for start, end in intervals:
                each[start:end] = True
            merged = merge(intervals)
            assert sum(end - start for start, end in merged) == each.sum()
            assert all(first[1] < second[0] for first, second in zip(merged, merged[1:], strict=False))
        assert overlap_share(ours, theirs) == pytest.approx((cells[0] & cells[1]).sum() / cells[0].sum())


def test_operations_of_a_phase_are_joined_and_collectives_are_not():
    events = [
        Event(COMPUTE, "a", "forward", 0.0, 1.0), Event(COMPUTE, "b", "forward", 1.05, 2.0),
        Event(COMPUTE, "c", "backward", 2.0, 3.0), Event(COMPUTE, "d", "backward", 3.5, 4.0),
        Event(COMMUNICATION, "x", SYNC, 2.5, 2.8), Event(COMMUNICATION, "y", SYNC, 2.8, 3.1),
    ]  # fmt: skip
    short = shorten(events, 0.1)
    assert [(one.name, one.start_ms, one.end_ms) for one in short] == [
        ("2 operations", 0, 2), ("c", 2, 3), ("x", 2.5, 2.8), ("y", 2.8, 3.1), ("d", 3.5, 4),
    ]  # fmt: skip
    assert overlap_of(events) == overlap_of(short) == pytest.approx(0.5 / 0.6)


def test_a_row_says_what_is_missing_from_a_trace():
    events = [Event(COMPUTE, "a", "forward", 0, 1), Event(COMMUNICATION, "x", SYNC, 0.5, 2)]
    fields = trace_fields(events, 1)
    assert (fields["traced_ms"], fields["compute_ms"], fields["communication_ms"]) == (2, 1, 1.5)
    assert fields["overlap_share"] == pytest.approx(1 / 3) and fields["check"] == "ok"
    assert set(fields["trace"][0]) == {"lane", "name", "phase", "start_ms", "end_ms"}
    assert trace_fields(events, 2)["check"] == "WRONG: 2 collectives planned, 1 traced"


def recorded(name, start, end, parent=None, device=DeviceType.CPU, annotation=False):
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), cpu_parent=parent, device_type=device,
        is_user_annotation=annotation,
    )  # fmt: skip


def test_torchs_events_count_to_the_ranges_in_which_they_start():
    def step(begin):
        linear = recorded("aten::linear", begin + 110, begin + 190)
        return [
            recorded("step", begin, begin + 1000),
            recorded("forward", begin + 100, begin + 200), linear,
            recorded("aten::mm", begin + 120, begin + 180, linear), recorded("backward", begin + 300, begin + 500),
            recorded("aten::mm", begin + 310, begin + 400), recorded("c10d::allreduce_", begin + 400, begin + 401),
            recorded("gloo:all_reduce", begin + 350, begin + 600),
            recorded(SYNC, begin + 500, begin + 700), recorded("aten::div_", begin + 650, begin + 660),
        ]  # fmt: skip

    events = torch_side.read([event for begin in (0, 5000, 10000) for event in step(begin)])
    assert events == [
        Event(COMPUTE, "aten::linear", "forward", 0.11, 0.19), Event(COMPUTE, "aten::mm", "backward", 0.31, 0.4),
        Event(COMMUNICATION, "gloo:all_reduce", SYNC, 0.35, 0.6), Event(COMPUTE, "aten::div_", "backward", 0.65, 0.66),
    ]  # fmt: skip
    kernels = [recorded("ncclDevKernel_AllReduce", 5300, 5400, device=DeviceType.CUDA)]
    kernels.append(recorded("gemm", 5310, 5350, device=DeviceType.CUDA))
    for name in ("step", "backward", "nccl:all_reduce"):  # a GPU's copies of ranges are no kernels
        kernels.append(recorded(name, 5300, 5400, device=DeviceType.CUDA, annotation=True))
    with_kernels = torch_side.read([event for begin in (0, 5000, 10000) for event in step(begin)] + kernels)
    assert {(one.lane, one.phase) for one in with_kernels if one not in events} == {
        (COMMUNICATION, SYNC), (COMPUTE, "compute"),
    }  # fmt: skip
    with pytest.raises(ValueError, match="trace must hold 3 steps, it has 1"):
        torch_side.read(step(0))


def test_jax_is_traced_and_read_by_the_names_of_its_program(tmp_path):
    (found,) = TOY.ranks.run_jax(jax_side.run, TOY, ("overlapped",), str(tmp_path))
    events, planned = found["overlapped"]
    phases = {phase: [one for one in events if one.phase == phase] for phase in (*PHASES, "metrics", SYNC)}
    assert len(phases[SYNC]) == 4 and len(phases["metrics"]) == 1 and planned == 5  # four tensors
    assert all(phases.values())
    assert phases["forward"][0].start_ms < phases["backward"][0].start_ms < phases["optimizer"][-1].start_ms
    assert {one.lane for one in phases[SYNC]} == {COMMUNICATION} and {one.lane for one in phases["loss"]} == {COMPUTE}
    assert min(one.start_ms for one in events) == 0 and all(one.end_ms >= one.start_ms for one in events)
    assert list((tmp_path / "jaxddp-overlapped").rglob("*.xplane.pb"))
    with pytest.raises(ValueError, match="must hold 3 steps, it has 0"):
        jax_side.read(tmp_path / "nowhere", SimpleNamespace(operations=()), waits_late=True)


def test_a_product_that_is_handed_on_lasts_until_the_next_operation(tmp_path, monkeypatch):
    product = Operation("dot", "backward", Work(matmul_flops={MatmulKind("f32", "default"): 9.0}))
    names = {one.name: one for one in (product, Operation("add", "backward", Work(num_bytes=9)))}
    step = (("dot", 0, 1e6), ("add", 4e6, 5e6), ("dot", 5e6, 6e6))
    ran = [(0, run, name, 1e7 * run + start, 1e7 * run + end) for run in range(3) for name, start, end in step]
    monkeypatch.setattr(jax_side, "_events", lambda path: ran)
    (tmp_path / "one.xplane.pb").touch()
    schedule = Schedule(tuple(names.values()))
    late, known = (jax_side.read(tmp_path, schedule, waits_late=flag) for flag in (True, False))
    assert [(one.name, one.start_ms, one.end_ms) for one in late] == [("dot", 0, 4), ("add", 4, 5), ("dot", 5, 6)]
    assert known[0].end_ms == 1


def test_gpus_do_not_number_their_runs(tmp_path, monkeypatch):
    product = Operation("dot", "backward", Work(matmul_flops={MatmulKind("f32", "default"): 9.0}))
    names = (product, Operation("add", "backward", Work(num_bytes=9)))
    ran = [("GPU:0", None, name, 1e7 * step + start, 1e7 * step + start + 1e6)
           for step in range(3) for name, start in (("dot", 0), ("add", 4e6), ("add", 6e6))]  # fmt: skip
    monkeypatch.setattr(jax_side, "_events", lambda path: ran)
    (tmp_path / "one.xplane.pb").touch()
    events = jax_side.read(tmp_path, Schedule(names), waits_late=False)
    assert [(one.name, one.start_ms, one.end_ms) for one in events] == [("dot", 0, 1), ("add", 4, 5), ("add", 6, 7)]


def test_torch_is_traced_and_read_by_its_ranges(tmp_path):
    setup = TrainingSetup("tiny", (), Ranks(2, "processes"), (RandomTokens(64, 16).batch(0, 8),))
    found = shared_pool().run(
        torch_side.run, setup.ranks, setup, ("naive", "overlapped"), str(tmp_path), num_ranks=2
    )[0]  # fmt: skip
    for name, (events, planned) in found.items():
        assert planned == 21 == sum(one.lane == COMMUNICATION for one in events)
        assert {one.phase for one in events} == {*PHASES, SYNC}
        assert (tmp_path / f"torchref-{name}.json.gz").stat().st_size > 0
        assert trace_fields(events, planned)["check"] == "ok"
    backward_ends = [
        max(one.end_ms for one in events if one.lane == COMPUTE and one.phase == "backward" and one.name == "aten::mm")
        for events, _ in found.values()
    ]
    starts = [min(one.start_ms for one in events if one.lane == COMMUNICATION) for events, _ in found.values()]
    assert starts[0] > backward_ends[0] and starts[1] < backward_ends[1]  # naive waits for the whole backward
