import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint import checkpoints as checkpoints_module
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.checkpoint.host_state import to_host
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.checkpoint.weights import export_weights
from jaxddp.cli import train_loop
from jaxddp.cli.interrupts import SIGNALS, Signalled
from jaxddp.cli.train_loop import train
from jaxddp.cli.train_options import NONFINITE, TrainOptions
from jaxddp.cli.train_report import StepReport
from jaxddp.models import SIZES, TransformerConfig, cross_entropy
from jaxddp.training.replicas_test import flip

# 12 tensors: 9 of the block, embedding, last norm and head.
SMALL = TransformerConfig(vocab=256, context=16, width=16, num_layers=1, num_heads=2, hidden=32)


@pytest.fixture(autouse=True, scope="module")
def started():
    """JAX with the eight devices of conftest.py; before it starts, a run may still ask for more."""
    assert jax.device_count() == 8


@pytest.fixture
def small(monkeypatch):
    """Makes options of a run that takes little more than compiling."""
    monkeypatch.setitem(SIZES, "small_bytes", SMALL)

    def options(**changes):
        values = {"model": "small_bytes", "devices": 2, "batch_size": 8, "optimizer": "sgd", "eval_batches": 2}
        return TrainOptions(**{**values, **changes})

    return options


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"A strategy is what its compiled program does. " * 200)
    return str(path)


def test_training_lowers_the_loss_and_the_summary_holds(small, text):
    reports: list[StepReport] = []
    lines: list[str] = []
    options = small(steps=40, optimizer="adamw", learning_rate=1e-2, data=text, eval_every=10)
    summary = train(options, lines.append, reports.append)
    assert [report.step for report in reports] == list(range(1, 41))
    assert [report.step for report in reports if report.validation_loss is not None] == [10, 20, 30, 40]
    # Untrained, a byte is one of 256: ln 256 = 5.55. One sentence over and over is soon known: 0.4 seen.
    assert 5 < summary.first_loss == reports[0].loss < 7
    assert summary.last_loss == reports[-1].loss < 1.5
    assert summary.validation_loss is not None and summary.validation_loss < 1.5
    assert summary.validation_loss == reports[-1].validation_loss
    assert summary.num_params == SMALL.num_params and summary.params_bytes == 4 * SMALL.num_params
    assert (summary.source, summary.num_bytes, summary.context) == (text, 9200, 16)
    assert summary.num_validation_bytes == 2 * 8 * 16
    assert summary.devices == f"2 simulated CPU devices on {os.cpu_count()} cores"
    assert summary.tokens_per_s == pytest.approx(8 * 16 / (summary.step_timings.median_ms / 1e3))
    assert summary.compile_s > summary.step_timings.median_ms / 1e3 > 0
    assert lines[0] == f"small_bytes ({SMALL.num_params:,} parameters) on {summary.devices}, bucketed"
    assert lines[1] == f"text: {text}, 9,200 bytes"


@pytest.mark.parametrize(
    "changes, num_collectives",
    [
        ({"strategy": "naive"}, 12),
        # Head and embedding take 16 KiB each; the others, 10 KiB between them, fit beside the first of the two.
        ({"bucket_mb": 27 / 1024, "devices": 4}, 2),
    ],
)
def test_the_strategy_decides_what_is_planned_and_compiled(small, changes, num_collectives):
    summary = train(small(steps=1, eval_batches=1, **changes))
    assert len(summary.planned) == len(summary.compiled) == num_collectives
    assert summary.as_planned
    assert sum(num_bytes for _, num_bytes in summary.planned) == summary.params_bytes


def test_ranks_and_microbatches_do_not_change_the_training(small):
    reports: list[StepReport] = []
    summary = train(small(steps=3, learning_rate=0.1, eval_every=0), on_step=reports.append)
    assert [report.validation_loss is not None for report in reports] == [False, False, True]
    # Float32 sums in another order.
    other = train(small(steps=3, learning_rate=0.1, eval_every=0, devices=1, microbatches=4))
    assert other.last_loss == pytest.approx(summary.last_loss, abs=1e-4)
    assert other.validation_loss == pytest.approx(summary.validation_loss, abs=1e-4)
    assert abs(summary.last_loss - summary.first_loss) > 1e-2


def test_one_rank_sends_nothing_and_too_short_a_text_has_no_validation(small, text):
    # 9200 bytes are 574 windows of 16 tokens, 29 of them held out.
    summary = train(small(data=text, steps=1, devices=1, batch_size=32))
    assert (summary.devices, summary.planned, summary.compiled) == ("1 CPU device", [], [])
    assert (summary.validation_loss, summary.num_validation_bytes) == (None, 0)


class Stop(Exception):
    pass


@pytest.fixture
def trainer_call(small, monkeypatch):
    """Gives what the options make of the trainer's arguments, and trains nothing."""

    def call(**changes):
        seen: dict[str, Any] = {}

        def stop(loss_fn, optimizer, strategy, mesh, **options):
            seen.update(optimizer=optimizer, strategy=strategy, mesh=mesh, **options)
            raise Stop

        monkeypatch.setattr("jaxddp.cli.train_loop.Trainer", stop)
        with pytest.raises(Stop):
            train(small(**changes))
        return seen

    return call


def test_options_reach_the_trainer(trainer_call):
    seen = trainer_call(devices=4, strategy="flat", microbatches=2, max_grad_norm=0.5, compute_dtype="bfloat16")
    assert (seen["compute_dtype"], seen["loss_scale"]) == ("bfloat16", None)
    assert (seen["mesh"].size, seen["strategy"].name) == (4, "flat")
    assert (seen["num_microbatches"], seen["max_grad_norm"]) == (2, 0.5)
    assert trainer_call(devices=None)["mesh"].size == 4
    assert trainer_call(compute_dtype="float16", nonfinite="skip")["loss_scale"] == "dynamic"


@pytest.mark.parametrize(
    "name, first_update",
    # The first step of Adam is the learning rate against the sign of the gradient; AdamW also takes off 1 % of that
    # rate times the parameter.
    [("sgd", -0.1 * 3.0), ("adam", -0.1), ("adamw", -0.1 * (1 + 0.01 * 2.0))],
)
def test_optimizer_by_name(trainer_call, name, first_update):
    optimizer = trainer_call(optimizer=name, learning_rate=0.1)["optimizer"]
    param = jnp.asarray(2.0)
    update, _ = optimizer.update(jnp.asarray(3.0), optimizer.init(param), param)
    # Float32, and Adam's bias correction is rounded to 1e-5.
    assert float(update) == pytest.approx(first_update, rel=1e-4)


def test_seed_reaches_parameters_and_data(small, monkeypatch):
    seeds: list[int] = []
    real_build = train_loop.build

    def build(model, seed):
        seeds.append(seed)
        return real_build(model, seed)

    monkeypatch.setattr(train_loop, "build", build)

    def stop(self, step, batch_size, *, seed):
        seeds.append(seed)
        raise Stop

    monkeypatch.setattr(train_loop.Corpus, "batch", stop)
    with pytest.raises(Stop):
        train(small(seed=7))
    assert seeds == [7, 7]


def test_weights_in_bfloat16_become_the_models_float32(small, tmp_path, monkeypatch):
    _, params = train_loop.build(SMALL, seed=5)
    rounded = {name: jnp.asarray(array, jnp.bfloat16) for name, array in to_numpy(params).items()}
    export_weights(path := str(tmp_path / "weights.safetensors"), rounded)
    given = []

    def stop(self, params, **_):
        given.append(params)
        raise Stop

    monkeypatch.setattr(train_loop.Trainer, "init", stop)
    with pytest.raises(Stop):
        train(small(weights=path))
    for name, array in to_numpy(given[0]).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, rounded[name].astype(jnp.float32), name)


# Checkpoints


def bigram_loss(params, batch):
    logits = params["embedding"][batch["tokens"]] @ params["head"]
    return cross_entropy(logits, batch["targets"])


@pytest.fixture
def bigram(small, monkeypatch):
    """Makes options of runs in float64, so that what ranks and strategies change is seen to be rounding."""

    def build(model, seed):
        rng = np.random.default_rng(seed)
        params = {"embedding": rng.normal(size=(256, 20)), "head": rng.normal(size=(20, 256))}
        return bigram_loss, jax.tree.map(jnp.asarray, params)

    monkeypatch.setattr(train_loop, "build", build)
    with jax.enable_x64(True):
        yield partial(small, eval_every=0, eval_batches=1)


def saved_state(folder, step):
    """The canonical arrays of a checkpoint, whoever saved it."""
    loss_fn, params = train_loop.build("small_bytes", seed=0)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-2, weight_decay=0.01), jaxddp.naive(), jaxddp.data_mesh(1))
    with Checkpoints(folder) as checkpoints:
        return dict(to_host(trainer, checkpoints.restore(trainer, params, step=step)[0]))


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(bigram, text, tmp_path):
    run = partial(bigram, data=text, optimizer="adamw", learning_rate=1e-2, batch_size=24)
    whole: list[StepReport] = []
    summary = train(run(steps=7, devices=1, strategy="naive", checkpoint=str(tmp_path / "whole")), on_step=whole.append)
    assert summary.first_step == 1
    parts: list[StepReport] = []
    lines: list[str] = []
    folder = str(tmp_path / "parts")
    for options in (
        {"steps": 2, "devices": 8, "strategy": "zero3"},
        {"steps": 5, "devices": 3, "strategy": "bucketed", "checkpoint_every": 2},
        {"steps": 7, "devices": 2, "strategy": "zero1", "microbatches": 3, "keep": 2},
    ):
        summary = train(run(checkpoint=folder, resume=True, **options), lines.append, parts.append)
    assert [report.step for report in parts] == [report.step for report in whole] == list(range(1, 8))
    # Float64: sums over ranks and micro-batches in another order, seven steps of AdamW.
    assert [report.loss for report in parts] == pytest.approx([report.loss for report in whole], abs=1e-12)
    assert summary.first_step == 6 and summary.first_loss == parts[5].loss
    expected = saved_state(tmp_path / "whole", 7)
    for name, array in saved_state(folder, 7).items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12, err_msg=name)
    assert [line for line in lines if "step" in line] == [
        f"no checkpoint in {folder} yet: starting at step 0",
        f"checkpoints in {folder}: steps 2",
        "resumed at step 2, which zero3 saved on 8 ranks",
        f"checkpoints in {folder}: steps 2, 4, 5",
        "resumed at step 5, which bucketed saved on 3 ranks",
        f"checkpoints in {folder}: steps 5, 7",
    ]


def test_another_batch_size_goes_on_in_the_data_where_the_last_one_stopped(bigram, text, tmp_path, monkeypatch):
    asked: list[tuple[int, int]] = []
    real_batch = train_loop.Corpus.batch

    def batch(self, step, batch_size, **options):
        asked.append((step, batch_size))
        return real_batch(self, step, batch_size, **options)

    run = partial(bigram, data=text, checkpoint=str(tmp_path), resume=True)
    train(run(steps=4, batch_size=6))
    monkeypatch.setattr(train_loop.Corpus, "batch", batch)
    train(run(steps=6, batch_size=12, allow_changes=True))
    assert asked == [(0, 12), (2, 12), (3, 12)]  # the first is compiled for


def test_an_interrupted_run_leaves_whole_checkpoints(bigram, text, tmp_path):
    folder = tmp_path / "checkpoints"

    def interrupt(report):
        if report.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(bigram(data=text, checkpoint=str(folder), checkpoint_every=2), on_step=interrupt)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]
    lines: list[str] = []
    train(bigram(data=text, steps=5, checkpoint=str(folder), resume=True), lines.append)
    assert "resumed at step 4, which bucketed saved on 2 ranks" in lines


def test_what_does_not_fit_the_checkpoint_is_refused(bigram, text, tmp_path):
    run = partial(bigram, data=text, checkpoint=str(tmp_path), steps=3)
    train(run(resume=True))
    other, edited = tmp_path / "other.txt", tmp_path / "edited.txt"
    other.write_bytes(b"Another text. " * 200)
    edited.write_bytes(b"A strategy is what its compiled program did. " * 200 + b"." * 200)
    anyway = {"allow_changes": True}
    for changes, reason in [
        ({}, rf"checkpoint \(='{tmp_path}'\) holds step 3: resume, or choose another folder"),
        ({"seed": 1}, r"seed \(=1\) must be 0, as in the checkpoint, to go on in the data"),
        ({"data": str(other)}, r"text_bytes \(=2800\) must be 9200, as in the checkpoint, to go on in the data"),
        (
            {"data": str(edited), **anyway},
            r"text_crc32 \(=\d+\) must be \d+, as in the checkpoint, to go on in the data",
        ),
        (
            {"learning_rate": 0.5},
            r"^learning_rate \(=0.5\) must be 0.001, as in the checkpoint of step 3: set allow_changes ",
        ),
        ({"max_grad_norm": 0.5}, r"^max_grad_norm \(=0.5\) must be None, as in the checkpoint of step 3"),
        ({"compression": "bf16"}, r"^compression \(=bf16\) must be none, as in the checkpoint of step 3"),
        ({"compute_dtype": "bfloat16"}, r"^compute_dtype \(=bfloat16\) must be None, as in the checkpoint of step 3"),
        ({"batch_size": 16}, r"^batch_size \(=16\) must be 8, as in the checkpoint of step 3"),
        ({"batch_size": 16, **anyway}, r"batch_size \(=16\) must divide the examples taken \(=24\)"),
        ({"optimizer": "adam"}, r"^optimizer \(=adam\) must be sgd, as in the checkpoint of step 3"),
        ({"optimizer": "adam", **anyway}, "is of another optimizer: optimizer state '0.count' is missing there and "),
    ]:
        with pytest.raises(ValueError, match=reason):
            train(run(**{"steps": 5, "resume": bool(changes), **changes}))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3]


@pytest.mark.full
def test_a_run_in_bfloat16_has_the_loss_of_one_in_float32(small, text):
    wide, narrow = (
        train(small(data=text, steps=4, strategy="zero2", microbatches=2, optimizer="adamw", compute_dtype=dtype))
        for dtype in (None, "bfloat16")
    )
    assert sorted(narrow.planned) == narrow.compiled
    assert narrow.last_loss != wide.last_loss
    assert narrow.last_loss == pytest.approx(wide.last_loss, rel=1e-2)
    assert narrow.validation_loss == pytest.approx(wide.validation_loss, rel=1e-2)


def test_what_changes_on_a_resume_is_said(bigram, text, tmp_path):
    run = partial(bigram, data=text, checkpoint=str(tmp_path), resume=True)
    train(run(steps=1))
    lines: list[str] = []
    train(run(steps=2, learning_rate=0.5, max_grad_norm=1.0, allow_changes=True), lines.append)
    assert [line for line in lines if line.startswith("changed")] == [
        "changed at step 1: learning_rate from 0.001 to 0.5",
        "changed at step 1: max_grad_norm from None to 1.0",
    ]


def test_a_checkpoint_of_before_settings_were_saved_is_resumed(bigram, text, tmp_path):
    loss_fn, params = train_loop.build("small_bytes", seed=0)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.naive(), jaxddp.data_mesh(1))
    with Checkpoints(tmp_path) as checkpoints:
        position = {"examples": 0, "seed": 0, "text_bytes": 9200}
        checkpoints.save(trainer, trainer.init(params), data_position=position)
    summary = train(bigram(data=text, checkpoint=str(tmp_path), resume=True, steps=1))
    assert summary is not None and summary.first_step == 1


def test_a_complete_run_takes_no_more_steps(bigram, text, tmp_path):
    run = partial(bigram, data=text, checkpoint=str(tmp_path), resume=True)
    train(run(steps=3))
    for steps in (3, 2):
        lines: list[str] = []
        assert train(run(steps=steps), lines.append, pytest.fail) is None
        assert lines[-1] == f"complete: the checkpoint in {tmp_path} has taken 3 of {steps} steps"
    with pytest.raises(ValueError, match=r"seed \(=1\) must be 0"):  # it is another run that is complete
        train(run(steps=3, seed=1))


def test_a_checkpoint_that_another_program_saved_is_refused(bigram, text, tmp_path):
    loss_fn, params = train_loop.build("small_bytes", seed=0)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.naive(), jaxddp.data_mesh(1))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, trainer.init(params), data_position=17)
    with pytest.raises(
        ValueError, match=r"data_position \(=17\) of the checkpoint of step 0 must be one of this program"
    ):
        train(bigram(data=text, checkpoint=str(tmp_path), resume=True))


# Numbers that are not finite


@pytest.fixture
def diverges(bigram, text, tmp_path):
    """A run from step 1 on, of which step 3 finds weights whose products overflow."""
    run = partial(bigram, data=text, checkpoint=str(tmp_path))
    train(run(steps=1))
    return partial(run, steps=40, learning_rate=1e302, resume=True, allow_changes=True)


def saved_params(folder, step):
    loss_fn, params = train_loop.build("small_bytes", seed=0)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.naive(), jaxddp.data_mesh(1))
    with Checkpoints(folder) as checkpoints:
        return dict(to_host(trainer, checkpoints.restore(trainer, params, step=step)[0]))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_numbers_that_are_not_finite_end_the_run_and_are_not_saved(diverges, tmp_path):
    with pytest.raises(FloatingPointError, match=r"of step 3 must be finite.*: params\.embedding, params\.head$"):
        train(diverges())
    assert names_in(tmp_path) == ["1"]


@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_a_checkpoint_from_which_no_step_is_finite_is_set_aside(diverges, tmp_path, nonfinite):
    """Step 2 is saved, as loss, gradient and weights are finite; whatever follows is not."""
    lines: list[str] = []
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            train(diverges(checkpoint_every=1, nonfinite=nonfinite, max_skips=2), lines.append)
        assert names_in(tmp_path) == ["1", "2.nonfinite"]
    assert lines.count("no step from the checkpoint of step 2 is finite: renamed it to 2.nonfinite") == 2
    assert sum(line.startswith("resumed at step 1, ") for line in lines) == 2
    (tmp_path / "2.nonfinite").rename(tmp_path / "2")
    assert np.isfinite(saved_params(tmp_path, 2)["params.head"]).all()


def test_the_only_checkpoint_stays(diverges, tmp_path):
    with pytest.raises(FloatingPointError):
        train(diverges(checkpoint_every=1))
    (tmp_path / "2.nonfinite").rename(tmp_path / "2")
    shutil.rmtree(tmp_path / "1")
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            train(diverges(nonfinite="stop"))
        assert names_in(tmp_path) == ["2"]


@pytest.mark.parametrize("nonfinite, last", [("stop", 3), ("skip", 5)])
def test_the_state_before_is_kept_beside_the_checkpoints_and_is_not_resumed(diverges, tmp_path, nonfinite, last):
    lines: list[str] = []
    for _ in range(2):
        with pytest.raises(
            FloatingPointError, match=rf"loss \(=(nan|inf)\) and gradient of step {last} must be finite"
        ):
            train(diverges(nonfinite=nonfinite, max_skips=2, keep=1), lines.append)
        assert names_in(tmp_path) == ["1", f"{last}.nonfinite"]
    assert sum(line.startswith("resumed at step 1, ") for line in lines) == 2
    assert lines.count(f"the state before is kept as {last}.nonfinite in {tmp_path}") == 2
    before = saved_params(tmp_path, 1)
    (tmp_path / f"{last}.nonfinite").rename(tmp_path / str(last))
    after = saved_params(tmp_path, last)
    assert before["params.head"].tobytes() != after["params.head"].tobytes()  # of step 2, which was finite
    assert np.isfinite(after["params.head"]).all()


def test_only_so_many_steps_in_a_row_are_skipped(diverges):
    steps: list[StepReport] = []
    with pytest.raises(FloatingPointError, match="the updates of this step and the 2 before it were skipped"):
        train(diverges(nonfinite="skip", max_skips=2), on_step=steps.append)
    assert steps[-1].step == 5


def test_a_checkpoint_that_is_due_in_a_skipped_step_is_saved_after_the_next_that_is_not(
    bigram, text, tmp_path, monkeypatch
):
    step_of, num_steps = train_loop.Trainer.step, 0

    def some_skipped(trainer, state, batch):
        nonlocal num_steps
        state, metrics = step_of(trainer, state, batch)
        num_steps += 1
        return state, metrics | {"skipped": num_steps in (4, 5)}

    monkeypatch.setattr(train_loop.Trainer, "step", some_skipped)
    train(bigram(data=text, checkpoint=str(tmp_path), checkpoint_every=2, steps=9, keep=9, nonfinite="skip"))
    assert names_in(tmp_path) == ["2", "6", "8", "9"]


def test_a_validation_that_is_not_finite_ends_the_run(bigram, text):
    with pytest.raises(FloatingPointError, match=r"^validation loss \(=nan\) after step 1 must be finite$"):
        train(bigram(data=text, steps=1, learning_rate=1e302))


def test_a_checkpoint_whose_validation_is_not_finite_is_set_aside(bigram, text, tmp_path):
    run = partial(bigram, data=text, checkpoint=str(tmp_path))
    train(run(steps=1))
    with pytest.raises(FloatingPointError, match=r"^validation loss \(=nan\) after step 2 must be finite$"):
        train(run(steps=2, learning_rate=1e302, resume=True, allow_changes=True))
    assert names_in(tmp_path) == ["1", "2.nonfinite"]


# Replicas that differ


@pytest.fixture
def faulty(monkeypatch):
    """Makes memory fail: after so many calls of ``step`` a bit of a weight of rank 1 is another, that often."""

    def break_after(call, times=1):
        step, calls = jaxddp.Trainer.step, []

        def flipping(trainer, state, batch):
            state, metrics = step(trainer, state, batch)
            calls.append(batch)
            if call <= len(calls) < call + times:
                state = state._replace(params=state.params | {"head": flip(state.params["head"], 1, 20)})
            return state, metrics

        monkeypatch.setattr(jaxddp.Trainer, "step", flipping)

    return break_after


def test_ranks_that_differ_end_the_run_and_are_not_saved(bigram, text, tmp_path, faulty):
    faulty(5)
    with pytest.raises(jaxddp.ReplicaError, match=r"^params\.head of .* after step 6:"):
        train(bigram(data=text, steps=9, checkpoint=str(tmp_path), checkpoint_every=3))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3]


def test_a_run_that_restores_ends_as_one_without_a_fault(bigram, text, tmp_path, faulty):
    options = partial(bigram, data=text, steps=9, checkpoint_every=3, check_replicas_every=1, replicas="restore")
    whole = train(options(checkpoint=str(tmp_path / "whole")))
    faulty(5)
    lines: list[str] = []
    restored = train(options(checkpoint=str(tmp_path / "restored")), say=lines.append)
    assert any("after step 5" in line and line.endswith("; restored step 3") for line in lines)
    assert restored.last_loss == whole.last_loss
    ours, theirs = (saved_params(tmp_path / name, 9) for name in ("restored", "whole"))
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def test_a_fault_that_comes_back_ends_the_run(bigram, text, tmp_path, faulty):
    faulty(5, times=10)
    with pytest.raises(jaxddp.ReplicaError, match=r"^params\.head of rank.* after step 4"):
        train(bigram(data=text, steps=9, checkpoint=str(tmp_path), checkpoint_every=3, check_replicas_every=1,
                     replicas="restore"))  # fmt: skip


# Disks and signals


LOCKS = """
import sys
from jaxddp.checkpoint import Checkpoints
try:
    Checkpoints(sys.argv[1]).reserve()
except ValueError as error:
    print(error)
"""


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that is full while the function it gives says so."""
    real, is_full = checkpoints_module._HostArrays._background_serialize, [lambda: False]

    async def write(self, *args):
        if is_full[0]():
            raise OSError(28, "No space left on device")
        await real(self, *args)

    monkeypatch.setattr(checkpoints_module._HostArrays, "_background_serialize", write)
    return lambda function: is_full.__setitem__(0, function)


def test_a_save_that_fails_ends_the_run_at_the_next_step(bigram, text, tmp_path, full_disk):
    steps: list[int] = []
    full_disk(lambda: bool(steps) and steps[-1] >= 3)

    def wait(report):
        steps.append(report.step)
        time.sleep(1.0)

    with pytest.raises(OSError, match=r"^checkpoint of step 4 in .* was not saved: .*No space left on device$"):
        train(bigram(data=text, steps=9, checkpoint=str(tmp_path), checkpoint_every=4), on_step=wait)
    assert steps[-1] in (4, 5)


@pytest.mark.parametrize("full_until", [8, 100])
def test_a_run_may_go_on_after_a_save_that_fails_but_the_last(bigram, text, tmp_path, full_disk, full_until):
    steps: list[int] = [0]
    said: list[str] = []
    full_disk(lambda: 3 <= steps[-1] < full_until)
    options = bigram(data=text, steps=10, checkpoint=str(tmp_path), checkpoint_every=2, failed_save="continue")

    def wait(report):
        steps.append(report.step)
        time.sleep(0.3)  # the write sees the step that it began in

    run = partial(train, options, on_step=wait, say=said.append)
    with nullcontext() if full_until == 8 else pytest.raises(OSError, match="checkpoint of step 10 .* was not saved"):
        run()
    assert steps[-1] == 10
    failures = [line for line in said if line.endswith("No space left on device; going on")]
    assert [line.split(" in ")[0] for line in failures][:2] == ["checkpoint of step 4", "checkpoint of step 6"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps()[0] == 2 and (checkpoints.latest_step() == 10) == (full_until == 8)


def test_a_second_run_on_one_folder_is_refused(bigram, text, tmp_path):
    run = partial(bigram, data=text, checkpoint=str(tmp_path), steps=2)
    refusals: list[str] = []

    def second(report):
        command = [sys.executable, "-c", LOCKS, str(tmp_path)]
        refusals.append(subprocess.run(command, capture_output=True, text=True, timeout=100, check=False).stdout)

    with Checkpoints(tmp_path) as held:
        train(run(steps=1), on_step=second)
        assert held.steps() == [1]
    reason = rf"directory \(='{tmp_path}'\) is being written to by process {os.getpid()} on .*: let that finish, "
    assert all(re.match(reason, refusal) for refusal in refusals) and len(refusals) == 1
    assert not (tmp_path / ".writer").exists()


def test_a_damaged_checkpoint_is_passed_over(bigram, text, tmp_path):
    run = partial(bigram, data=text, checkpoint=str(tmp_path), checkpoint_every=2, resume=True)
    train(run(steps=4))
    expected = saved_params(tmp_path, 4)
    shutil.rmtree(tmp_path / "4" / "state")
    lines: list[str] = []
    train(run(steps=4), lines.append)
    assert f"checkpoint of step 4 in {str(tmp_path)!r} is damaged or half-written: took step 2" in lines
    assert "resumed at step 2, which bucketed saved on 2 ranks" in lines
    for name, array in saved_params(tmp_path, 4).items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_when_the_step_is_saved(bigram, text, tmp_path, number):
    def on_step(report):
        if report.step == 3:
            signal.raise_signal(number)

    with pytest.raises(Signalled) as signalled:
        train(bigram(data=text, checkpoint=str(tmp_path), checkpoint_every=2), on_step=on_step)
    assert signalled.value.number == number
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 4]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_so(bigram, text):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        summary = train(bigram(data=text, steps=2), on_step=lambda report: signal.raise_signal(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert summary is not None
