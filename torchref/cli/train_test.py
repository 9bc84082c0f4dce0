"""The twin's command: what the console shows of a run, and what it refuses."""

import os
import re
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from jaxddp.cli.train import TrainOptions
from jaxddp.sizes import SIZES, TransformerConfig
from torchref.__main__ import main
from torchref.cli.train_program import train
from torchref.registry import STRATEGIES
from torchref.script_test import free_port

SMALL = TransformerConfig(vocab=256, context=16, width=16, num_layers=1, num_heads=2, hidden=32)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"A strategy is what its compiled program does. " * 200)
    return str(path)


BAD_INPUT = {
    "train --strategy fast": f"unknown strategy 'fast': one of {', '.join(STRATEGIES)}",
    "train --model tiny": "argument --model: invalid choice: 'tiny' (choose from ",
    "train --devices 4 --processes 2": "devices (=4) must be processes (=2): a rank is a process",
    "train --weights /no/where": "[Errno 2] No such file or directory: '/no/where'",
    "train --compute-dtype bfloat16": "unrecognized arguments: --compute-dtype bfloat16",
}


@pytest.fixture
def alone(monkeypatch):
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
    assert (status, len(lines)) == (2, 1) and lines[0].startswith(f"error: {BAD_INPUT[command]}")


def test_other_ranks_than_the_processes_of_the_job_are_refused(alone, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--devices=3", "--batch-size=6"]) == 2
    assert "devices (=3) must be the job's processes (=2), a rank each" in capsys.readouterr().err


def test_a_batch_that_ranks_cannot_share_is_refused_before_they_start(monkeypatch, capsys):
    monkeypatch.setattr("torchref.cli.train_program.launch", lambda *args, **options: pytest.fail("ranks start"))
    assert main(["train", "--processes=2", "--batch-size=3"]) == 2
    assert "batch_size (=3) must be divisible" in capsys.readouterr().err


def run_on_rank(folder, port, options):
    """Trains as a process of a job whose processes are those of the pool; gives the reports, and what was said."""
    SIZES["small_bytes"] = SMALL
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    said = []
    # Its thread would outlive the job, and end a rank of a later test.
    with mock.patch("jaxddp.processes.watchdog._Watchdog", return_value=None):
        reports = train(TrainOptions(data=f"{folder}/text.txt", model="small_bytes", **options), said.append)
    dist.destroy_process_group()
    return reports, "\n".join(said)


def error_on_rank(*arguments):
    """What a training raises on this rank: ranks that raise are replaced, which takes seconds."""
    try:
        run_on_rank(*arguments)
    except Exception as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return ""


def fails(ranks, folder, expected, options):
    for said in ranks.run(error_on_rank, str(folder), free_port(), options, num_ranks=2):
        assert re.search(expected, said), said


@pytest.mark.parametrize("strategy", ["bucketed", "zero2", "zero3"])
def test_training_lowers_the_loss_and_communicates_what_was_planned(ranks, strategy, text, tmp_path):
    options = {"strategy": strategy, "steps": 12, "batch_size": 8, "learning_rate": 3e-2, "checkpoint_every": 6}
    (reports, said), other = ranks.run(run_on_rank, str(tmp_path), free_port(), options, num_ranks=2)
    assert [report.validation_loss is not None for report in reports] == [step in (6, 12) for step in range(1, 13)]
    assert [report.loss for report in reports] == [report.loss for report in other[0]]
    assert 5 < reports[0].loss < 7 and reports[-1].loss < 3.5 and reports[-1].validation_loss < 3.5
    assert re.search(r"^collectives  planned \d+ .*; issued: the same$", said, re.M)
    assert f"({SMALL.num_params:,} parameters) on 2 x CPU device, {strategy}" in said


def test_a_gradient_that_is_not_finite_ends_the_run_whatever_the_loss(ranks, text, tmp_path):
    options = {"steps": 2, "batch_size": 8, "optimizer": "sgd", "learning_rate": 1e30}
    message = r"FloatingPointError: loss \(=5\.\d+\) and gradient norm \(=nan\) of step 2 must be finite"
    fails(ranks, tmp_path, message, options)


CHECKPOINT = {"batch_size": 6, "learning_rate": 3e-2, "max_grad_norm": 1.0}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".writer")


def newest(folder):
    path = max((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    return int(path.name), torch.load(path / "state.pt", weights_only=True)


def test_a_run_goes_on_under_another_strategy_on_other_ranks(ranks, text, tmp_path):
    def run(folder, num_ranks, **options):
        options = CHECKPOINT | {"checkpoint": str(tmp_path / folder), "resume": True} | options
        return ranks.run(run_on_rank, str(tmp_path), free_port(), options, num_ranks=num_ranks)[0]

    run("whole", 1, strategy="flat", steps=8)
    run("parts", 2, strategy="zero1", steps=3, checkpoint_every=2)
    assert names_in(tmp_path / "parts") == ["2", "3"]
    options = CHECKPOINT | {"checkpoint": str(tmp_path / "parts"), "resume": True, "steps": 8, "seed": 4}
    fails(ranks, tmp_path, r"ValueError: seed \(=4\) must be 0, as in the checkpoint, to go on in the data", options)
    reports, _ = run("parts", 3, strategy="zero3", steps=8, checkpoint_every=0)
    assert [report.step for report in reports] == [4, 5, 6, 7, 8]
    reports, _ = run("parts", 2, strategy="zero2", steps=8, learning_rate=0.5)
    assert reports == []
    (step, expected), (other, found) = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert step == other == 8 and found.keys() == expected.keys()
    for name in found:  # float32: the order of sums, through Adam's small moments
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-4 if "params" in name else 1e-2)


def test_the_state_before_is_kept_and_skips_are_counted(ranks, text, tmp_path):
    options = {"batch_size": 8, "checkpoint": str(tmp_path / "ck"), "checkpoint_every": 5, "steps": 19}
    options |= {"optimizer": "sgd", "learning_rate": 1e30, "nonfinite": "skip"}  # step 1 alone is finite
    fails(ranks, tmp_path, r"loss \(=.*\) and gradient norm \(=.*\) of step 11 must be finite", options)
    assert names_in(tmp_path / "ck") == ["11.nonfinite"]
