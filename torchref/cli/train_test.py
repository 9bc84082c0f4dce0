"""The twin's command: what the console shows of a run, and what it refuses."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from jaxddp.cli.train_options import TrainOptions
from jaxddp.cli.train_test import ranks_of
from jaxddp.sizes import SIZES, TransformerConfig
from torchref.__main__ import main
from torchref.checkpoint import archive
from torchref.cli.train_loop import _load_weights, _step, train
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
    "train --resume": "resume (=True) must come with checkpoint, the folder to go on from",
    "train --elastic": "elastic (=True) must come with max_restarts",
    "train --max-restarts 1 --checkpoint ck": "max_restarts (=1) must come with resume where there is a checkpoint",
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
    with mock.patch("torchref.launch.watch"):  # its thread would outlive the job, and end a rank of a later test
        summary = train(TrainOptions(data=f"{folder}/text.txt", model="small_bytes", **options), on_step=reports.append)
    return summary, reports


def error_on_rank(run, *arguments):
    """What a training raises on this rank: ranks that raise are replaced, which takes seconds."""
    try:
        run(*arguments)
    except Exception as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return ""


def fails(ranks, folder, expected, options, *more, run=run_on_rank):
    for said in ranks.run(error_on_rank, run, str(folder), free_port(), options, *more, num_ranks=2):
        assert re.search(expected, said), said


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
    fails(ranks, tmp_path, message, options)


def test_an_update_too_large_for_its_dtype_ends_the_run(ranks, text, tmp_path):
    options = {"steps": 2, "batch_size": 8, "optimizer": "adam", "learning_rate": 1e38, "eval_every": 0}
    fails(ranks, tmp_path, "FloatingPointError: updates must be finite: value cannot be converted to type", options)


def validate_nan_on_rank(*arguments):
    with mock.patch("torchref.cli.train_loop._mean_loss", lambda net, batches: float("nan")):
        run_on_rank(*arguments)


def test_a_validation_that_is_not_finite_ends_the_run(ranks, text, tmp_path):
    fails(
        ranks,
        tmp_path,
        r"FloatingPointError: validation loss \(=nan\) after step 1 must be finite",
        {"steps": 1, "batch_size": 8},
        run=validate_nan_on_rank,
    )


CHECKPOINT = {"batch_size": 6, "learning_rate": 3e-2, "eval_every": 0, "max_grad_norm": 1.0}


def newest(folder):
    path = max((path for path in folder.glob("*.npz") if path.stem.isdecimal()), key=lambda path: int(path.stem))
    with np.load(path, allow_pickle=False) as archive:
        return int(path.stem), {name: archive[name] for name in archive.files if name != "about"}


def test_a_run_goes_on_under_another_strategy_on_other_ranks(ranks, text, tmp_path):
    def run(folder, num_ranks, **options):
        options = CHECKPOINT | {"checkpoint": str(tmp_path / folder), "resume": True} | options
        return ranks.run(run_on_rank, str(tmp_path), free_port(), options, num_ranks=num_ranks)[0]

    run("whole", 1, strategy="flat", steps=8)
    run("parts", 2, strategy="zero1", steps=3, checkpoint_every=2, keep=2)
    assert sorted(path.name for path in (tmp_path / "parts").glob("*.npz")) == ["2.npz", "3.npz"]
    summary, reports = run("parts", 3, strategy="zero3", steps=8, checkpoint_every=0)
    assert summary.first_step == 4 and [report.step for report in reports] == [4, 5, 6, 7, 8]
    assert run("parts", 2, strategy="zero2", steps=8) == (None, [])  # nothing is left to do
    (step, expected), (other, found) = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert step == other == 8 and found.keys() == expected.keys()
    for name in found:  # float32: the order of sums, through Adam's small moments
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2e-4 if "params" in name else 1e-2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"resume": False}, r"checkpoint \(='.*'\) holds step 2: resume, or choose another folder"),
        ({"learning_rate": 0.5}, r"learning_rate \(=0.5\) must be 0.03, as in the checkpoint of step 2: set allow_cha"),
        ({"seed": 4}, r"seed \(=4\) must be 0, as in the checkpoint, to go on in the data"),
    ],
)
def test_a_run_with_other_options_is_refused_on_all_ranks(ranks, text, tmp_path, options, expected):
    first = CHECKPOINT | {"checkpoint": str(tmp_path / "ck"), "steps": 2}
    ranks.run(run_on_rank, str(tmp_path), free_port(), first, num_ranks=2)
    fails(ranks, tmp_path, f"ValueError: {expected}", first | {"resume": True, "steps": 4} | options)


def run_in_own_folder(folder, port, options):
    return run_on_rank(folder, port, options | {"checkpoint": f"{options['checkpoint']}{dist.get_rank()}"})


def test_hosts_may_name_the_folder_otherwise_and_must_share_it(ranks, text, tmp_path):
    options = CHECKPOINT | {"checkpoint": str(tmp_path / "ck"), "steps": 2, "resume": True}
    (tmp_path / "ck0").mkdir()
    (tmp_path / "ck1").symlink_to(tmp_path / "ck0")
    summary, _ = ranks.run(run_in_own_folder, str(tmp_path), free_port(), options, num_ranks=2)[1]
    assert summary.first_step == 1 and newest(tmp_path / "ck1")[0] == 2
    (tmp_path / "ck1").unlink()
    expected = r"ValueError: step of the newest checkpoint \(=None in rank 1\) must be 2, as in rank 0"
    fails(ranks, tmp_path, expected, options | {"steps": 4}, run=run_in_own_folder)


def test_numbers_that_are_not_finite_replace_no_checkpoint(ranks, text, tmp_path):
    options = {"batch_size": 8, "checkpoint": str(tmp_path / "ck"), "checkpoint_every": 1, "eval_every": 0}
    ranks.run(run_on_rank, str(tmp_path), free_port(), options | {"steps": 2}, num_ranks=2)
    more = {"resume": True, "allow_changes": True, "optimizer": "adamw", "learning_rate": 1e15, "steps": 9}
    fails(ranks, tmp_path, r"FloatingPointError: loss \(=.*\) and gradient norm \(=.*\) of step \d", options | more)
    step, found = newest(tmp_path / "ck")
    assert all(np.isfinite(array).all() for array in found.values())
    assert list((tmp_path / "ck").glob("*.nonfinite.npz")) and step >= 1


def test_stop_keeps_the_state_before_and_skip_counts(ranks, text, tmp_path):
    options = {"batch_size": 8, "checkpoint": str(tmp_path / "ck"), "checkpoint_every": 5, "eval_every": 0, "steps": 9}
    options |= {"optimizer": "sgd", "learning_rate": 1e30}  # step 1 is finite, and none that follows
    fails(
        ranks,
        tmp_path,
        r"loss \(=.*\) and gradient of step 2 must be finite: the updates of this step",
        options | {"nonfinite": "stop"},
    )
    assert [path.name for path in (tmp_path / "ck").glob("*.npz")] == ["2.nonfinite.npz"]
    fails(
        ranks,
        tmp_path,
        "of step 5 must be finite: the updates of this step and the 3 before it were",
        options | {"nonfinite": "skip", "max_skips": 3},
    )
    assert [path.name for path in (tmp_path / "ck").glob("*.npz")] == ["5.nonfinite.npz"]


def save_but_not_step_2(path, *arguments, write=archive.write):
    if path.name == "2.npz":
        raise OSError(errno.ENOSPC, "No space left on device")
    write(path, *arguments)


def run_on_a_full_disk(*arguments):
    with mock.patch("torchref.checkpoint.archive.write", side_effect=save_but_not_step_2):
        return run_on_rank(*arguments)


def test_a_failed_save_ends_the_run_or_not(ranks, text, tmp_path):
    options = {"batch_size": 8, "checkpoint": str(tmp_path / "ck"), "checkpoint_every": 1, "eval_every": 0, "steps": 4}
    fails(
        ranks,
        tmp_path,
        r"OSError: checkpoint of step 2 in .* was not saved: No space left on device",
        options,
        run=run_on_a_full_disk,
    )
    goes_on = options | {"resume": True, "failed_save": "continue"}
    summary, _ = ranks.run(run_on_a_full_disk, str(tmp_path), free_port(), goes_on, num_ranks=2)[0]
    assert summary.first_step == 2
    assert sorted(path.name for path in (tmp_path / "ck").glob("*.npz")) == ["1.npz", "3.npz", "4.npz"]


def run_with_a_flipped_bit(folder, port, options, step):
    """Flips a bit of a weight on rank 1 before a step, once."""
    is_done = []

    def take(trainer, batch, take=_step):
        if trainer.num_steps + 1 == step and dist.get_rank() == 1 and not is_done:
            is_done.append(True)
            trainer.net.module.head.weight.data.view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << 20)
        return take(trainer, batch)

    with mock.patch("torchref.cli.train_loop._step", take):
        return run_on_rank(folder, port, options)


def test_a_flipped_bit_ends_the_run_or_the_newest_checkpoint_is_restored(ranks, text, tmp_path):
    options = {"batch_size": 8, "checkpoint": str(tmp_path / "ck"), "checkpoint_every": 4, "eval_every": 0, "steps": 8}
    options_of_one = options | {"check_replicas_every": 3}
    fails(
        ranks,
        tmp_path,
        r"ReplicaError: params\.head\.weight of rank .* differs by up to .* after step 6",
        options_of_one,
        5,
        run=run_with_a_flipped_bit,
    )
    assert [path.name for path in (tmp_path / "ck").glob("*.npz")] == ["4.npz"]
    restoring = options | {"resume": True, "replicas": "restore"}
    summary, reports = ranks.run(run_with_a_flipped_bit, str(tmp_path), free_port(), restoring, 7, num_ranks=2)[0]
    assert [report.step for report in reports] == [5, 6, 7, 5, 6, 7, 8]
    assert summary.last_loss == reports[-1].loss


TRAIN = [sys.executable, "-m", "torchref", "train"]
ARGUMENTS = "--ranks 2 --model byte_shallow --steps 16 --batch-size 2 --checkpoint-every 4 --eval-batches 1 --resume"


def wait_for(path, seconds=100):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_that_loses_a_rank_is_started_again_and_ends_as_one_that_did_not(tmp_path, number):
    arguments = f"{ARGUMENTS} --max-restarts 1 --stuck-s 10 --log-dir {tmp_path}/logs --checkpoint".split()
    assert subprocess.run([*TRAIN, *arguments, tmp_path / "whole"], timeout=250, check=False).returncode == 0
    lost = tmp_path / "lost"
    with subprocess.Popen([*TRAIN, *arguments, lost], stderr=subprocess.PIPE, text=True) as process:
        wait_for(lost / "4.npz")
        os.kill(ranks_of(lost)[1], number)
        _, error = process.communicate(timeout=250)
    assert process.returncode == 0, error
    noticed = r"(is gone|has not answered for 10 s), its last step \d+, its log \S+/rank-1.log"
    assert re.search(rf"jaxddp: process 1 {noticed}: process 0 ends", error), error
    assert not ranks_of(lost)
    (step, expected), (other, found) = newest(tmp_path / "whole"), newest(lost)
    assert step == other == 16 and found.keys() == expected.keys()
    for name in found:  # the same program on the same ranks: the same bits
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_once_it_is_saved(tmp_path, number):
    arguments = f"{ARGUMENTS} --log-dir {tmp_path}/logs --checkpoint".replace("--steps 16", "--steps 100000").split()
    with subprocess.Popen(
        [*TRAIN, *arguments, tmp_path / "ck"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_for(tmp_path / "ck" / "4.npz")
        process.send_signal(number)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + number, output
    steps = re.findall(rf"ended by {signal.Signals(number).name} after (\d+) of 100000 steps", output)
    assert len(steps) == 2 and len(set(steps)) == 1, output
    assert newest(tmp_path / "ck")[0] == int(steps[0])


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
