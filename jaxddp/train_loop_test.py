import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxddp import train_loop
from jaxddp.models import SIZES, TransformerConfig
from jaxddp.train_cli import TrainOptions
from jaxddp.train_loop import StepReport, train

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
    assert (summary.num_ranks, summary.devices) == (2, f"2 simulated CPU devices on {os.cpu_count()} cores")
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

        monkeypatch.setattr("jaxddp.train_loop.Trainer", stop)
        with pytest.raises(Stop):
            train(small(**changes))
        return seen

    return call


def test_options_reach_the_trainer(trainer_call):
    seen = trainer_call(devices=4, strategy="flat", microbatches=2, max_grad_norm=0.5)
    assert (seen["mesh"].size, seen["strategy"].name) == (4, "flat")
    assert (seen["num_microbatches"], seen["max_grad_norm"]) == (2, 0.5)
    assert trainer_call(devices=None)["mesh"].size == 4


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
