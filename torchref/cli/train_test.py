"""The twin's command: what the console shows of a run, and what it refuses."""

import contextlib
import os
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from jaxddp.cli.train_options import TrainOptions
from jaxddp.sizes import SIZES, TransformerConfig
from torchref.__main__ import main
from torchref.cli.train_loop import _load_weights, train
from torchref.launch import RankError
from torchref.registry import STRATEGIES

SMALL = TransformerConfig(vocab=256, context=16, width=16, num_layers=1, num_heads=2, hidden=32)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"A strategy is what its compiled program does. " * 200)
    return str(path)


BAD_INPUT = {
    "train --strategy fast": f"unknown strategy 'fast': one of {', '.join(STRATEGIES)}",
    "train --strategy flat --bucket-mb 3": "strategy 'flat' has no buckets: leave out bucket_mb (=3)",
    "train --model tiny": "model 'tiny' has a vocabulary of 64, too small for bytes (=256 values): one of byte, ",
    "train --ranks 0": "devices (=0) must be a positive integer",
    "train --devices 2": "devices (=2) must be the job's processes (=1), a rank each",
    "train --compression zip": "unknown compression 'zip': one of none, noop, bf16, fp16, powersgd:RANK",
    "train --weights /no/where": "[Errno 2] No such file or directory: '/no/where'",
    "train --resume": "unrecognized arguments: --resume",
}


@pytest.fixture
def alone(monkeypatch):
    """The environment of a job of one process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(command, alone, text, capsys):
    try:
        status = main([*command.split(), "--data", text])
    except SystemExit as ended:  # argparse's way
        status = ended.code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("torchref: torchrun: ")]
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith(f"error: {BAD_INPUT[command]}")


@pytest.mark.parametrize("command", [command for command in BAD_INPUT if command != "train --devices 2"])
def test_outside_a_job_it_is_one_line_before_ranks_start(command, text, capsys, monkeypatch):
    monkeypatch.setattr("torchref.cli.train.launch", pytest.fail)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with contextlib.suppress(SystemExit):  # argparse's way
        assert main([*command.split(), "--data", text]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {BAD_INPUT[command]}") and output.count("\n") == 1


def run_on_rank(folder, port, options):
    """Trains as a process of a job whose processes are those of the pool."""
    SIZES["small_bytes"] = SMALL
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    reports = []
    summary = train(TrainOptions(data=f"{folder}/text.txt", model="small_bytes", **options), on_step=reports.append)
    return summary, reports


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_lowers_the_loss_and_communicates_what_was_planned(ranks, strategy, text, tmp_path):
    options = {"strategy": strategy, "steps": 12, "batch_size": 8, "learning_rate": 3e-2, "eval_every": 6}
    (summary, reports), other = ranks.run(run_on_rank, str(tmp_path), free_port(), options, num_ranks=2)
    assert [report.validation_loss is not None for report in reports] == [step in (6, 12) for step in range(1, 13)]
    assert [report.loss for report in reports] == [report.loss for report in other[1]]
    assert 5 < summary.first_loss < 7 and summary.last_loss < 3.5 and summary.validation_loss < 3.5
    assert summary.as_planned and summary.planned
    assert summary.num_params == SMALL.num_params and summary.params_bytes == 4 * SMALL.num_params
    assert summary.devices == "2 CPU devices of 2 processes"


def test_a_gradient_that_is_not_finite_ends_the_run_whatever_the_loss(ranks, text, tmp_path):
    options = {"steps": 2, "batch_size": 8, "optimizer": "sgd", "learning_rate": 1e30, "eval_every": 0}
    message = r"FloatingPointError: loss \(=5\.\d+\) and gradient norm \(=nan\) of step 2 must be finite"
    with pytest.raises(RankError, match=message):
        ranks.run(run_on_rank, str(tmp_path), free_port(), options, num_ranks=2)


def test_an_update_too_large_for_its_dtype_ends_the_run(ranks, text, tmp_path):
    options = {"steps": 2, "batch_size": 8, "optimizer": "adam", "learning_rate": 1e38, "eval_every": 0}
    with pytest.raises(
        RankError, match="FloatingPointError: updates must be finite: value cannot be converted to type"
    ):
        ranks.run(run_on_rank, str(tmp_path), free_port(), options, num_ranks=2)


def validate_nan_on_rank(*arguments):
    with mock.patch("torchref.cli.train_loop._mean_loss", lambda net, batches: float("nan")):
        run_on_rank(*arguments)


def test_a_validation_that_is_not_finite_ends_the_run(ranks, text, tmp_path):
    with pytest.raises(RankError, match=r"FloatingPointError: validation loss \(=nan\) after step 1 must be finite"):
        ranks.run(validate_nan_on_rank, str(tmp_path), free_port(), {"steps": 1, "batch_size": 8}, num_ranks=2)


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_weights_come_from_either_format(tmp_path):
    expected = {"a.weight": np.arange(6, dtype="float32").reshape(2, 3), "b": np.float32(2)}
    np.savez(tmp_path / "weights.npz", **expected)
    tensors = {name: torch.tensor(array) for name, array in expected.items()} | {"c": torch.ones(2).bfloat16()}
    safetensors.torch.save_file(tensors, tmp_path / "weights.safetensors")
    for path, more in (("weights.npz", {}), ("weights.safetensors", {"c": np.ones(2, "float32")})):
        loaded = _load_weights(str(tmp_path / path))
        assert loaded.keys() == (expected | more).keys()
        for name, array in (expected | more).items():
            assert loaded[name].dtype == array.dtype
            np.testing.assert_array_equal(loaded[name], array)
    (tmp_path / "bad.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(
        ValueError, match=r"^file '.*bad.safetensors' must hold weights, it is truncated or another kind"
    ):
        _load_weights(str(tmp_path / "bad.safetensors"))
