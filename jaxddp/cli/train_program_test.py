import re
import signal
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.cli import train_program
from jaxddp.cli.parser import SIGNALS, noted_signals
from jaxddp.cli.train import StepReport, TrainOptions
from jaxddp.cli.train_program import train
from jaxddp.comparison_test import drawn, refusal
from jaxddp.models import SIZES, TransformerConfig, cross_entropy
from jaxddp.training.replicas_test import flip

# 12 tensors: 9 of the block, embedding, last norm and head.
SMALL = TransformerConfig(vocab=256, context=16, width=16, num_layers=1, num_heads=2, hidden=32)
STEPS = r"checkpoints in .*: steps (.*)$"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(SIZES, "small_bytes", SMALL)
    values = {"model": "small_bytes", "devices": 2, "batch_size": 8, "optimizer": "sgd", "checkpoint_every": 0}
    return lambda **changes: TrainOptions(**{**values, **changes})


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"A strategy is what its compiled program does. " * 200)
    return str(path)


def test_options_reach_the_trainer(small, text, monkeypatch):
    def trainer_call(**changes):
        with monkeypatch.context() as patched, pytest.raises(AttributeError):
            patched.setattr(jaxddp, "Trainer", call := Mock(return_value=None))
            train(small(data=text, **changes))
        _, _, strategy, mesh = call.call_args.args
        return call.call_args.kwargs | {"strategy": strategy, "mesh": mesh}

    seen = trainer_call(devices=4, strategy="flat", microbatches=2, max_grad_norm=0.5, compute_dtype="bfloat16")
    assert (seen["mesh"].size, seen["strategy"].name, seen["compute_dtype"]) == (4, "flat", "bfloat16")
    assert (seen["num_microbatches"], seen["max_grad_norm"], seen["nonfinite"]) == (2, 0.5, "ignore")
    assert trainer_call(devices=None, nonfinite="stop")["nonfinite"] == "skip"


def test_optimizer_by_name(small):
    # The first step of Adam is the learning rate against the sign of the gradient; AdamW also takes off 1 % of that
    # rate times the parameter.
    for name, first_update in {"sgd": -0.1 * 3.0, "adam": -0.1, "adamw": -0.1 * (1 + 0.01 * 2.0)}.items():
        optimizer = train_program.make_optimizer(small(optimizer=name, learning_rate=0.1))
        param = jnp.asarray(2.0)
        update, _ = optimizer.update(jnp.asarray(3.0), optimizer.init(param), param)
        # Float32, and Adam's bias correction is rounded to 1e-5.
        assert float(update) == pytest.approx(first_update, rel=1e-4)


@pytest.fixture
def bigram(small, text, monkeypatch):
    """Makes options of runs in float64, so that what ranks and strategies change is seen to be rounding."""

    def loss_fn(params, batch):
        return cross_entropy(params["embedding"][batch["tokens"]] @ params["head"], batch["targets"])

    def build(model, seed):
        return loss_fn, jax.tree.map(jnp.asarray, drawn(seed, embedding=(256, 20), head=(20, 256)))

    monkeypatch.setattr(train_program, "build", build)
    with jax.enable_x64(True):
        yield partial(small, data=text)


def trainer_of_one(optimizer):
    loss_fn, params = train_program.build("small_bytes", seed=0)
    return jaxddp.Trainer(loss_fn, optimizer, jaxddp.naive(), jaxddp.data_mesh(1)), params


def saved_state(folder, step, optimizer=None):
    trainer, params = trainer_of_one(optimizer or optax.sgd(0.1))
    with jaxddp.Checkpoints(folder) as checkpoints:
        state, _ = checkpoints.restore(trainer, params, step=step)
    return {name: np.asarray(leaf) for name, leaf in jaxddp.named_leaves(state._replace(key=())).items()}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(bigram, tmp_path):
    run = partial(bigram, optimizer="adamw", learning_rate=1e-2, batch_size=24)
    whole = train(run(steps=7, devices=1, strategy="naive", checkpoint=str(tmp_path / "whole")))
    parts: list[StepReport] = []
    lines: list[str] = []
    folder = str(tmp_path / "parts")
    for options in (
        {"steps": 2, "devices": 8, "strategy": "zero3"},
        {"steps": 7, "devices": 2, "strategy": "zero1", "microbatches": 3, "checkpoint_every": 2},
    ):
        parts += train(run(checkpoint=folder, resume=True, **options), lines.append)
    assert [report.step for report in parts] == [report.step for report in whole] == list(range(1, 8))
    # Float64: sums over ranks and micro-batches in another order, seven steps of AdamW.
    assert [report.loss for report in parts] == pytest.approx([report.loss for report in whole], abs=1e-12)
    adamw = optax.adamw(1e-2, weight_decay=0.01)
    expected = saved_state(tmp_path / "whole", 7, adamw)
    for name, array in saved_state(folder, 7, adamw).items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12, err_msg=name)
    assert [found[1] for line in lines if (found := re.match(STEPS, line))] == ["2", "4, 6, 7"]


def test_weights_are_read_from_a_file(bigram, tmp_path):
    losses = []
    for seed in (0, 5):
        _, params = train_program.build("small_bytes", seed)
        np.savez(path := str(tmp_path / f"{seed}.npz"), **to_numpy(params))
        losses.append(train(bigram(steps=1, weights=path))[0].loss)
    assert losses[0] == train(bigram(steps=1))[0].loss != losses[1]


def test_a_complete_run_takes_no_more_steps_and_what_does_not_fit_its_checkpoint_is_refused(bigram, tmp_path):
    program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    lock = [sys.executable, "-c", program, tmp_path / ".writer"]

    def second(line):
        if line.startswith("step 1/"):
            assert "BlockingIOError" in subprocess.run(lock, capture_output=True, text=True).stderr

    run = partial(bigram, checkpoint=str(tmp_path))
    train(run(steps=3), second)
    assert train(run(steps=2, resume=True)) == []
    other, edited = tmp_path / "other.txt", tmp_path / "edited.txt"
    other.write_bytes(b"Another text. " * 200)
    edited.write_bytes(b"A strategy is what its compiled program did. " * 200 + b"." * 200)
    for changes, reason in [
        ({"resume": False}, "holds step 3: resume, or another folder"),
        ({"seed": 1}, "seed (=1) must be 0, as in the checkpoint"),
        ({"seed": 1, "steps": 3}, "seed (=1) must be 0"),  # it is another run that is complete
        ({"data": str(other)}, "text_crc32 (="),
        ({"data": str(edited)}, "text_crc32 (="),
        ({"batch_size": 16}, "batch_size (=16) must divide the examples taken (=24)"),
        ({"optimizer": "adam"}, "is of another optimizer: "),
    ]:
        assert reason in refusal(train, run(**{"steps": 5, "resume": True, **changes}))
    assert names_in(tmp_path) == ["3"]
    trainer, params = trainer_of_one(optax.sgd(0.1))
    with jaxddp.Checkpoints(tmp_path / "of another program") as checkpoints:
        checkpoints.save(trainer, trainer.init(params), data_position={"epoch": 1})
    found = refusal(train, bigram(checkpoint=str(tmp_path / "of another program"), resume=True))
    assert "must be one of this command" in found


@pytest.fixture
def diverges(bigram, tmp_path):
    """A run from step 1 on, of which step 3 finds weights whose products overflow."""
    run = partial(bigram, checkpoint=str(tmp_path))
    train(run(steps=1))
    return partial(run, steps=40, learning_rate=1e302, resume=True)


def test_numbers_that_are_not_finite_end_the_run_and_are_not_saved(diverges, bigram, tmp_path):
    with pytest.raises(FloatingPointError, match=r"of step 3 must be finite"):
        train(diverges())
    assert names_in(tmp_path) == ["1"]
    with pytest.raises(FloatingPointError, match=r"^validation loss \(=nan\) after step 1 must be finite$"):
        train(bigram(steps=1, learning_rate=1e302, checkpoint=str(tmp_path / "validated")))
    assert names_in(tmp_path / "validated") == []


@pytest.mark.parametrize("nonfinite, last", [("stop", 3), ("skip", 12)])
def test_the_state_before_is_kept_beside_the_checkpoints_and_is_not_resumed(diverges, tmp_path, nonfinite, last):
    for _ in range(2):
        lines: list[str] = []
        with pytest.raises(FloatingPointError, match=rf"gradient norm \(=(nan|inf)\) of step {last} must be"):
            train(diverges(nonfinite=nonfinite), lines.append)
        assert sum("is skipped: loss (=" in line for line in lines) == last - 3
        assert names_in(tmp_path) == ["1", f"{last}.nonfinite"]
    before = saved_state(tmp_path, 1)
    after = saved_state(tmp_path / f"{last}.nonfinite", last)
    assert before["params.head"].tobytes() != after["params.head"].tobytes()  # of step 2, which was finite
    assert np.isfinite(after["params.head"]).all()


def test_no_checkpoint_is_saved_while_steps_are_skipped(bigram, tmp_path, monkeypatch):
    step_of, num_steps = jaxddp.Trainer.step, 0

    def some_skipped(trainer, state, batch):
        nonlocal num_steps
        state, metrics = step_of(trainer, state, batch)
        num_steps += 1
        return state, metrics | {"skipped": num_steps in (4, 5)}

    monkeypatch.setattr(jaxddp.Trainer, "step", some_skipped)
    train(bigram(checkpoint=str(tmp_path), checkpoint_every=2, steps=9, nonfinite="skip"))
    assert names_in(tmp_path) == ["6", "8", "9"]


def test_ranks_that_differ_end_the_run_and_are_not_saved(bigram, tmp_path, monkeypatch):
    step, calls = jaxddp.Trainer.step, []

    def flipping(trainer, state, batch):
        """A bit of a weight of rank 1 becomes another in the fifth step."""
        state, metrics = step(trainer, state, batch)
        calls.append(batch)
        if len(calls) == 5:
            state = state._replace(params=state.params | {"head": flip(state.params["head"], 1, 20)})
        return state, metrics

    monkeypatch.setattr(jaxddp.Trainer, "step", flipping)
    with pytest.raises(jaxddp.ReplicaError, match=r"^params\.head of .* after step 6:"):
        train(bigram(steps=9, checkpoint=str(tmp_path), checkpoint_every=3))
    assert names_in(tmp_path) == ["3"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_when_the_step_is_saved(bigram, tmp_path, capsys, number):
    def say(line):
        if line.startswith("step   2/"):
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as ended:
        train(bigram(checkpoint=str(tmp_path), checkpoint_every=2), say)
    line = f"ended by {number.name} after 3 of 200 steps\n"
    assert (ended.value.code, capsys.readouterr().err) == (128 + number, line)
    assert names_in(tmp_path) == ["2", "3"]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with noted_signals(is_in_job=False) as signals:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signals == []
