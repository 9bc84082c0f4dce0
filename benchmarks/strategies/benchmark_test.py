"""The comparison from end to end, on a toy, which compiles fast: resumed, on both kinds of ranks, with a wrong peer."""

import io
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.buckets import benchmark as buckets
from benchmarks.harness.options import Options
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.run import Run
from benchmarks.main import benchmark as main_job
from benchmarks.strategies import benchmark as strategies
from benchmarks.training import frameworks, torch_side
from benchmarks.training.measure import StrategySpec, TrainingSetup, merge_ranks
from benchmarks.training.steps import step_rows
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.models import SIZES, build
from torchref.launch import shared_pool

# The same batch six times, and enough steps, so that the loss must fall.
_RNG = np.random.default_rng(0)
BATCHES = ({name: _RNG.normal(size=(8, width)).astype(np.float32) for name, width in (("x", 10), ("y", 5))},) * 6
NAMES = ("naive", "bucketed", "jit", "DistributedDataParallel", "ZeroRedundancyOptimizer", "fully_shard")
NUM_BYTES, CAP_MB = 272 * 4, 0.0005  # of four tensors, in two buckets
# Adam's first steps have full size whatever the gradient, here 1e-2; rounding was seen to move weights by 4e-7.
TOY = TrainingSetup("toy", (), Ranks(2, "simulated"), BATCHES, 1, tolerance=1e-4, must_learn=True, learning_rate=1e-2)


BUCKETED = ("bucketed", "zero1", "zero2", "DistributedDataParallel", "ZeroRedundancyOptimizer")


def specs(*names):
    return tuple(StrategySpec(name, CAP_MB if name in BUCKETED else None) for name in names)


def run_in(folder, name="strategies"):
    return Run(folder, Console(file=io.StringIO(), width=220, highlight=False), name)


def refuse(*args):
    raise AssertionError("measured twice")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that was interrupted after the first framework, and resumed; its folder, output and result."""
    folder, setup = tmp_path_factory.mktemp("run"), replace(TOY, strategies=specs(*NAMES), num_in_a_row=3)
    setup = replace(setup, num_on_device=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frameworks, "_run_jax", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            strategies.run(run_in(folder), setup)
    left = sorted(path.name for path in folder.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frameworks, "_run_torch", refuse)
        this = run_in(folder)
        holds = strategies.run(this, setup)
    return folder, this.console.file.getvalue(), holds, left


def test_every_check_holds(finished):
    _, output, holds, _ = finished
    assert holds, output


def test_what_is_measured_stays_and_the_weights_until_both_are_there(finished):
    folder, output, _, left = finished
    assert left == ["between-frameworks.npz", "metrics.jsonl", "torchref.npz"]
    assert "torchref: was measured before" in output
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "table.md"]


def test_every_row_is_complete_and_stands_alone(finished):
    folder, *_ = finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    peers = {"torchref": list(NAMES[3:]), "jaxddp": ["jit"]}
    assert [(row["framework"], row["strategy"]) for row in rows] == [
        *((framework, name) for framework, own in peers.items() for name in ["naive", "bucketed", *own]),
        ("jaxddp and torchref", "single-process training"),
    ]
    for row in rows[:-1]:
        assert row["check"] == "ok"
        assert (row["num_ranks"], row["params_bytes"]) == (2, NUM_BYTES)
        assert (row["global_batch"], row["microbatch"]) == (8, 4)
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert len(row["rounds_ms"]) == len(row["in_a_row_rounds_ms"]) == 5
        assert 0 < min(row["in_a_row_rounds_ms"]) <= row["in_a_row_ms"] <= max(row["in_a_row_rounds_ms"])
        assert row["device_ms"] is None and row["no_device_ms"]  # asked for, though there is no GPU
        assert row["loss"] < row["first_loss"]
        assert row["versions"] and row["command"].startswith("python -m benchmarks")
        if row["strategy"] in ("ZeroRedundancyOptimizer", "fully_shard"):
            assert row["exposed_ms"] is None and not row["baseline_rounds_ms"]
        else:
            differences = np.subtract(row["rounds_ms"], row["baseline_rounds_ms"])
            assert row["exposed_ms"] == pytest.approx(np.median(differences), abs=1e-3)  # of rounds rounded to 1e-4
            assert row["exposed_p10_ms"] <= row["exposed_ms"] <= row["exposed_p90_ms"]
            assert row["exposed_share"] == pytest.approx(row["exposed_ms"] / row["median_ms"])
        if row["strategy"] in ("naive", "bucketed"):
            assert row["planned"] and sum(num_bytes for _, num_bytes in row["compiled"]) == NUM_BYTES
        else:
            assert row["planned"] is None
    assert sum(num_bytes for _, num_bytes in rows[-2]["compiled"]) == NUM_BYTES + 4  # of jit: the loss goes with them


def test_the_table_is_written(finished):
    folder, output, *_ = finished
    table = (folder / "table.md").read_text()
    for words in (
        "| bucketed 0.0005 MiB | jaxddp | XLA in-process | 2 simulated | 2 AR | 2 AR |",
        "| jit | jaxddp | XLA in-process | 2 simulated | - | 1 AR |",
        "| naive | torchref | Gloo | 2 processes | 4 AR | 4 AR |",
        "| fully_shard | torchref | Gloo | 2 processes | - | - |",
    ):
        assert words in table
    assert "jaxddp: 2 simulated CPU devices in one process, on 2 core(s), XLA in-process" in table
    assert "single-process JAX against single-process PyTorch" in output
    said = "- device, not run: ValueError: the profiler has recorded nothing on a device ("
    (line,) = [line.removeprefix(said) for line in table.splitlines() if line.startswith(said)]
    assert all(f"jaxddp {name}" in line for name in ("naive", "bucketed 0.0005 MiB", "jit")) and "torch" not in line


@pytest.fixture
def initial(tmp_path):
    """A file of weights."""
    np.savez(tmp_path / "initial.npz", **to_numpy(build("toy")[1]))
    return str(tmp_path / "initial.npz")


def silent_and_failing(ranks, setup, initial):
    """Keeps one peer from communicating, and another from starting; runs on each rank."""

    class Broken(torch_side.Peer):
        def __init__(self, setup, spec, *args, sends):
            if spec.name == "fully_shard":
                raise NotImplementedError("no such device\nand more")
            super().__init__(setup, spec, *args, sends=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_side, "Peer", Broken)
        return torch_side.run(ranks, setup, initial)


def test_a_peer_that_is_wrong_is_marked_and_one_that_fails_is_a_row(initial):
    setup = replace(TOY, strategies=specs("DistributedDataParallel", "fully_shard"), with_baselines=False)
    side = merge_ranks(shared_pool().run(silent_and_failing, setup.ranks, setup, initial, num_ranks=2))
    assert [row["check"] for row in step_rows("torchref", setup, side)] == [
        "WRONG: weights differ by more than 1e-04", "not run: NotImplementedError: no such device",
    ]  # fmt: skip


def on_a_fake_gpu(ranks, setup, initial):
    """Runs torch's side with CUDA's events on this host's clock; the second rank's show 1 s more."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at + dist.get_rank())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        return torch_side.run(ranks, setup, initial)


def test_steps_are_timed_on_the_device_as_long_as_on_the_slowest_rank(initial):
    names = ("zero1", "DistributedDataParallel")
    setup = replace(TOY, strategies=specs(*names), with_baselines=False, num_on_device=3)
    side = merge_ranks(shared_pool().run(on_a_fake_gpu, setup.ranks, setup, initial, num_ranks=2))
    for row in step_rows("torchref", setup, side):
        assert row["check"] == "ok" and "no_device_ms" not in row
        assert len(row["device_rounds_ms"]) == 3 and min(row["device_rounds_ms"]) > 1000
        assert row["device_ms"] == pytest.approx(np.median(row["device_rounds_ms"]), abs=1e-3)


def failing_without_communication(ranks, setup, initial):
    """Keeps a strategy from running without its communication, and a peer from starting; runs on each rank."""

    def refuse_silence(setup, spec, module, wire):
        if wire is torch_side.compression.noop:
            raise TypeError("no silence")
        return wrap(setup, spec, module, wire)

    class Broken(torch_side.Peer):
        def __init__(self, *args, sends):
            raise IndexError("one too many")

    with pytest.MonkeyPatch.context() as patch:
        wrap = torch_side.wrap
        patch.setattr(torch_side, "wrap", refuse_silence)
        patch.setattr(torch_side, "Peer", Broken)
        return torch_side.run(ranks, setup, initial)


def test_what_crashes_is_a_fault_of_a_peer_too_and_of_a_step_without_communication(initial):
    setup = replace(TOY, strategies=specs("naive", "fully_shard"))
    side = merge_ranks(shared_pool().run(failing_without_communication, setup.ranks, setup, initial, num_ranks=2))
    naive, peer = step_rows("torchref", setup, side)
    assert naive["check"] == "FAILED: TypeError: no silence, without its communication"
    assert naive["median_ms"] > 0 and naive["exposed_ms"] is None
    assert peer["check"] == "FAILED: IndexError: one too many"


def test_a_peer_alone_is_of_one_framework(tmp_path, monkeypatch):
    setup = replace(TOY, strategies=specs("jit"))
    monkeypatch.setattr(frameworks, "_run_torch", refuse)
    monkeypatch.setattr(frameworks, "_run_jax", lambda *args: (_ for _ in ()).throw(ValueError("not here")))
    this = run_in(tmp_path)
    frameworks.measure_both(this, dict.fromkeys(frameworks.FRAMEWORKS, setup))
    assert [(row["part"], row["check"]) for row in this.rows] == [("jaxddp", "FAILED: not here")]


def test_all_strategies_and_peers_see_the_same_batches():
    setup, described = strategies.describe(Options(ranks=2, steps=3, batch_size=4))
    ours = ["naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3"]
    assert [spec.name for spec in setup.of("jaxddp")] == [*ours, "jit"]
    assert [spec.name for spec in setup.of("torchref")] == [*ours, *NAMES[3:]]
    assert setup.num_timed == 3 and setup.must_learn and setup.tolerance == 1e-3
    assert setup.batches[0]["tokens"].shape == (4, 128)
    assert "standard library" in described
    short, _ = main_job.describe(Options(steps=4))
    assert [spec.name for spec in short.strategies] == ours
    assert (short.model, short.global_batch) == ("byte_shallow", 4)
    chosen = main_job.describe(Options(model="byte", ranks=6))[0]
    assert (chosen.model, chosen.global_batch) == ("byte", 6)
    long = strategies.describe(Options())[0]
    assert (short.model, long.model) == ("byte_shallow", "byte") and short.num_timed < long.num_timed
    # Several buckets for either model.
    assert StrategySpec("bucketed", 4.0) in short.strategies and StrategySpec("bucketed", 4.0) in long.strategies
    others, described = strategies.describe(Options(model="lm_9m", strategies=("bucketed", "jit")))
    assert others.strategies == (StrategySpec("bucketed", 25.0), StrategySpec("jit"))
    assert others.tolerance is None and not others.must_learn and "random tokens" in described


def test_gpus_train_what_fills_them(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.ranks._counted_gpus", lambda: (4, 4))
    monkeypatch.setattr(strategies, "free_bytes", lambda kind: 80 * 10**9)
    setup, described = strategies.describe(Options(dtype="tf32"))
    assert (setup.model, setup.ranks, setup.global_batch, setup.dtype) == ("seed_xl", Ranks(4, "gpus"), 64, "tf32")
    assert "tf32" in described and "torch.compile" in [spec.name for spec in setup.of("torchref")]
    swept, _ = buckets.describe(Options(ranks=2, quick=True))
    assert (swept.model, swept.ranks.num, swept.global_batch, swept.num_warmup) == ("seed_xl", 2, 32, 2)
    assert setup.num_on_device == swept.num_on_device == 5
    assert strategies.describe(Options(on="simulated"))[0].model == "byte"


def test_frameworks_take_turns(tmp_path):
    setup = replace(TOY, strategies=specs("naive"), takes_turns=True, with_baselines=False)
    this = run_in(tmp_path)
    assert strategies.run(this, setup), this.console.file.getvalue()
    assert [(row["framework"], row["in_turns"]) for row in this.rows[:2]] == [("torchref", True), ("jaxddp", True)]


def test_frameworks_take_turns_where_both_fit_into_memory(monkeypatch):
    monkeypatch.setattr(strategies, "free_bytes", lambda kind: 64 * 2**30)
    # But not in the main job, whose first rows are torch's.
    assert strategies.describe(Options())[0].takes_turns and buckets.describe(Options())[0].takes_turns
    assert not main_job.describe(Options())[0].takes_turns
    needed = strategies.describe(Options(model="lm_9m"))[0]
    monkeypatch.setattr(strategies, "free_bytes", lambda kind: 8 * 2**30)
    assert needed.takes_turns and not strategies.describe(Options(model="lm_9m"))[0].takes_turns


@pytest.mark.full
def test_a_framework_that_fails_leaves_the_turns_to_the_other(tmp_path, monkeypatch):
    setup = replace(TOY, strategies=specs("naive"), takes_turns=True, with_baselines=False)
    monkeypatch.setattr(frameworks, "_run_jax", lambda *args: (_ for _ in ()).throw(ValueError("not here")))
    this = run_in(tmp_path)
    assert not strategies.run(this, setup)
    assert [row["check"] for row in this.rows] == [
        "ok",
        "FAILED: not here",
        "FAILED: one of the frameworks has no results",
    ]


@pytest.mark.full
def test_both_frameworks_train_in_bfloat16(tmp_path):
    setup = strategies.describe(Options(model="tiny", dtype="bf16", steps=2, quick=True, strategies=("bucketed",)))[0]
    this = run_in(tmp_path)
    assert strategies.run(this, setup), this.console.file.getvalue()
    rows = [row for row in this.rows if row["strategy"] == "bucketed"]
    for row in rows:
        assert row["params_bytes"] == 2 * SIZES["tiny"].num_params and row["dtype"] == "bf16"
    # Gloo sends bfloat16 as it is, XLA's collectives of CPUs as float32.
    assert {row["framework"]: sum(size for _, size in row["compiled"]) for row in rows} == {
        "torchref": 2 * SIZES["tiny"].num_params, "jaxddp": 4 * SIZES["tiny"].num_params,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategies": ("naive", "ddp")}, r"unknown strategy 'ddp': one of naive, .*, fully_shard$"),
        ({"dtype": "tf32"}, r"^dtype \(=tf32\) must be f32 or bf16 on CPUs"),
        ({"model": "gpt"}, r"unknown model 'gpt': one of tiny, byte, "),
        ({"batch_size": 5}, r"batch_size \(=5\) must be divisible by the number of ranks \(=2\)"),
        ({"model": "tiny", "data": "here"}, r"data \(=here\) must come with a model of bytes, such as 'byte'"),
    ],
)
def test_bad_input(given, message):
    with pytest.raises(ValueError, match=message):
        strategies.describe(Options(**given))


def test_what_does_not_fit_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(strategies, "free_bytes", lambda kind: 8 * 2**30)
    assert strategies.describe(Options(model="lm_9m"))[0].model == "lm_9m"
    # Of torch: 7 strategies and 3 peers, each with its baseline, and the single-process one: 21.
    needed = 2 * (171_098_880 * 4 * (3 * 21 + 1) + 2**29) / 2**30
    rule = (
        rf"^model \(=seed_xl\) must fit into memory: 21 training runs side by side on 2 ranks need .* {needed:.1f} GiB"
    )
    with pytest.raises(ValueError, match=rule):
        strategies.describe(Options(model="seed_xl"))
