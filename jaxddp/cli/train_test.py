import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.__main__ import main
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.cli.interrupts import Signalled
from jaxddp.cli.train import add_parser
from jaxddp.cli.train_options import OPTIMIZERS, TrainOptions
from jaxddp.models import SIZES, build
from jaxddp.registry import STRATEGIES

TRAIN = [sys.executable, "-m", "jaxddp", "train"]


@pytest.fixture(autouse=True, scope="module")
def started():
    """JAX with the eight devices of conftest.py; before it starts, a run may still ask for more."""
    assert jax.device_count() == 8


BAD_INPUT = {
    "": "the following arguments are required: COMMAND; see python -m jaxddp --help",
    "fly": "argument COMMAND: invalid choice: 'fly' (choose from ",
    "train --strategy fast": f"unknown strategy 'fast': one of {', '.join(STRATEGIES)}",
    "train --strategy flat --bucket-mb 3": "strategy 'flat' has no buckets: leave out bucket_mb (=3)",
    "train --bucket-mb 0": "bucket_mb (=0.0) must be a positive number of MiB",
    "train --bucket-mb -1": "bucket_mb (=-1.0) must be a positive number of MiB",
    "train --bucket-mb nan": "bucket_mb (=nan) must be a positive number of MiB",
    "train --model toy": "unknown model 'toy': one of byte, ",
    "train --model tiny": "model 'tiny' has a vocabulary of 64, too small for bytes (=256 values): one of byte, ",
    "train --model byte_shallow --devices 1 --weights /no/where": "[Errno 2] No such file or directory: '/no/where'",
    "train --data /no/where": "data path '/no/where' does not exist",
    "train --devices 0": "devices (=0) must be a positive integer",
    "train --devices -1": "devices (=-1) must be a positive integer",
    "train --devices 1.5": "argument --devices: invalid int value: '1.5'; see python -m jaxddp train --help",
    "train --devices 3": "batch_size (=32) must be divisible by devices x microbatches (=3 x 1)",
    "train --devices 2 --microbatches 5": "batch_size (=32) must be divisible by devices x microbatches (=2 x 5)",
    "train --microbatches 64": "batch_size (=32) must be divisible by devices x microbatches (=4 x 64)",
    "train --microbatches 0": "microbatches (=0) must be a positive integer",
    "train --batch-size 0": "batch_size (=0) must be a positive integer",
    "train --steps 0": "steps (=0) must be a positive integer",
    "train --steps": "argument --steps: expected one argument",
    "train --eval-batches 0": "eval_batches (=0) must be a positive integer",
    "train --eval-every -1": "eval_every (=-1) must not be negative",
    "train --seed -1": "seed (=-1) must be at least 0 and below 2^31",
    "train --seed 99999999999": "seed (=99999999999) must be at least 0 and below 2^31",
    "train --optimizer lion": "unknown optimizer 'lion': one of adamw, adam, sgd",
    "train --learning-rate 0": "learning_rate (=0.0) must be a positive finite number",
    "train --learning-rate inf": "learning_rate (=inf) must be a positive finite number",
    "train --max-grad-norm nan": "max_grad_norm (=nan) must be positive",
    "train --resume": "resume (=True) must come with checkpoint, the folder to go on from",
    "train --checkpoint-every -1": "checkpoint_every (=-1) must not be negative; 0 saves at the end only",
    "train --data=": "argument --data: must not be empty; see python -m jaxddp train --help",
    "train --checkpoint=": "argument --checkpoint: must not be empty",
    "train --log-dir=": "argument --log-dir: must not be empty",
    "inspect --out=": "argument --out: must not be empty",
    "launch --ranks 1 --log-dir= script.py": "argument --log-dir: must not be empty",
    "train --compute-dtype int8": "compute_dtype (='int8') must be one of bfloat16, float16, float32",
    "train --compute-dtype float16": "nonfinite (='raise') must be 'skip' in float16, which overflows now and then",
    "train --elastic": "elastic (=True) must come with max_restarts",
    "train --nonfinite ignore": "nonfinite (='ignore') must be one of raise, skip, stop",
    "train --replicas ignore": "replicas (='ignore') must be one of stop, restore",
    "train --replicas restore": "replicas (='restore') must come with checkpoint, the folder to restore from",
    "train --failed-save ignore": "failed_save (='ignore') must be one of stop, continue",
    "train --stuck-s 0": "stuck_s (=0.0) must be a positive finite number",
    "train --check-replicas-every -1": "check_replicas_every (=-1) must not be negative; 0 checks before saving only",
    "train --max-skips -1": "max_skips (=-1) must not be negative",
    "train --allow-changes": "allow_changes (=True) must come with resume",
    "train --keep 0": "keep (=0) must be a positive integer",
    "train --quick": "unrecognized arguments: --quick",
    "train --dev 2": "unrecognized arguments: --dev 2",
    # 16 devices, where this process has started with 8.
    "train --devices 16": "num_ranks (=16) must be at most the number of devices (=8 cpu); to simulate them",
}


def status_of(arguments):
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse's way
        return ended.code


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(command, capsys):
    assert status_of(command.split()) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {BAD_INPUT[command]}")
    assert output.err.count("\n") == 1 and output.err.endswith("\n")
    assert output.out == ""


def test_unreadable_and_empty_data_are_one_line(tmp_path, capsys, monkeypatch):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert main(["train", "--data", str(empty)]) == 2
    assert capsys.readouterr().err == f"error: file '{empty}' must hold text, it is empty\n"

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission\ndenied")

    monkeypatch.setattr("jaxddp.cli.train_loop.Corpus", refuse)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied\n"


def test_more_ranks_than_accelerators_says_how_to_simulate(capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(platform="gpu")])
    assert main(["train", "--devices", "4"]) == 2
    assert "num_ranks (=4) must be at most the number of devices (=1 gpu)" in capsys.readouterr().err


def test_no_device_at_all_is_one_line(capsys, monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "error: JAX finds no device to run on: Unable to initialize backend 'cuda'\n"


def test_ranks_that_a_jobs_processes_cannot_share_evenly_are_one_line(capsys, monkeypatch, tmp_path):
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--devices", "3", "--log-dir", str(tmp_path), "--batch-size", "6"]) == 2
    assert capsys.readouterr().err == "error: devices (=3) must be divisible by the job's processes (=2)\n"
    monkeypatch.delenv("MASTER_PORT")
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("error: MASTER_PORT must be set, as RANK, WORLD_SIZE, MASTER_ADDR is: ")


def test_bugs_are_not_hidden(monkeypatch):
    def fail(*arguments):
        raise TypeError("a bug")

    monkeypatch.setattr("jaxddp.cli.train_loop.train", fail)
    with pytest.raises(TypeError, match="a bug"):
        main(["train"])


def test_every_option_is_on_the_command_line_with_its_default(monkeypatch):
    seen: list[TrainOptions] = []
    monkeypatch.setattr("jaxddp.cli.train_loop.train", lambda options, *rest: seen.append(options))
    assert main(["train"]) == 0  # with no summary, as of a complete run
    everything: dict[str, Any] = {
        "strategy": "flat",
        "devices": 2,
        "simulate": True,
        "steps": 7,
        "data": "x",
        "model": "xl",
        "weights": "w.npz",
        "bucket_mb": 1.5,
        "compression": "bf16",
        "compute_dtype": "bfloat16",
        "batch_size": 12,
        "microbatches": 3,
        "learning_rate": 0.5,
        "optimizer": "sgd",
        "max_grad_norm": 2.0,
        "seed": 9,
        "eval_every": 11,
        "eval_batches": 13,
        "checkpoint": "y",
        "checkpoint_every": 17,
        "keep": 19,
        "resume": True,
        "allow_changes": True,
        "nonfinite": "skip",
        "max_skips": 3,
        "check_replicas_every": 5,
        "replicas": "restore",
        "failed_save": "continue",
        "stuck_s": 20.0,
    }
    assert set(everything) == {field.name for field in fields(TrainOptions)}
    switches = ("simulate", "resume", "allow_changes")
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in everything.items() if name not in switches]
    assert main(["train", "--simulate", "--resume", "--allow-changes", *arguments]) == 0
    assert seen == [TrainOptions(), TrainOptions(**everything)]


def test_help_is_quick_and_lists_every_strategy_model_and_optimizer():
    code = (
        "import sys; from jaxddp.__main__ import main\n"
        "try: main(['train', '--help'])\n"
        "finally: print([name for name in ('jax', 'flax', 'rich', 'jaxddp.models', 'jaxddp.training.data') "
        "if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *words, imported = result.stdout.splitlines()
    assert imported == "[]"
    words = re.findall(r"[\w.]+", " ".join(words))
    readable = [name for name, config in SIZES.items() if config.vocab >= 256]
    assert set(words) >= {*STRATEGIES, *readable, *OPTIMIZERS, "MiB"}


def test_program_in_a_pipe():
    arguments = "--model byte_shallow --strategy bucketed --devices 2 --steps 6"
    arguments += " --batch-size 4 --eval-every 3 --eval-batches 1"
    environment = {**os.environ, "FORCE_COLOR": "1"}
    result = subprocess.run(
        [*TRAIN, *arguments.split()], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "\x1b" not in result.stdout and "\r" not in result.stdout
    lines, num_params = result.stdout.splitlines(), SIZES["byte_shallow"].num_params
    assert (
        lines[0]
        == f"byte_shallow ({num_params:,} parameters) on 2 simulated CPU devices on {os.cpu_count()} cores, bucketed"
    )
    losses = [float(loss) for loss in re.findall(r"^step \d/6  loss ([\d.]+)  [\d,]+ tokens/s", result.stdout, re.M)]
    assert len(losses) == 6 and losses[0] > 5 and min(losses[1:]) < losses[0] - 1
    assert result.stdout.count("validation") == 3
    summary = dict(re.findall(r"^(\w+(?: time)?)  +(.*)$", "\n".join(lines[-10:]), re.M))
    assert (
        summary["collectives"]
        == f"planned 2 all-reduces, {4 * num_params / 2**20:.1f} MiB per step; compiled: the same"
    )
    assert summary["loss"] == f"{losses[0]:.3f} nats at step 1, {losses[-1]:.3f} at step 6"
    nats, bits = map(float, re.findall(r"([\d.]+) (?:nats|bits)", summary["validation"]))
    assert bits == pytest.approx(nats * 1.442695, abs=2e-3)
    assert re.fullmatch(r"median [\d,]+ ms \(p10 [\d,]+, p90 [\d,]+\); compiled in [\d.]+ s", summary["step time"])


def signalled_at_its_first_step(arguments, number):
    """Status, output and errors of a run that gets a signal once its first step is shown."""
    with subprocess.Popen(
        [*TRAIN, *arguments.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step"):
                    break
            process.send_signal(number)
            output, error = process.communicate(timeout=120)
        finally:
            process.kill()
    return process.returncode, output, error


def test_interrupt_is_one_line_and_status_130_and_what_is_saved_is_whole(tmp_path):
    model = "byte_shallow"
    arguments = (
        f"--model {model} --devices 1 --steps 1000 --batch-size 1 --checkpoint {tmp_path} --checkpoint-every 1 --resume"
    )
    status, output, error = signalled_at_its_first_step(arguments, signal.SIGINT)
    assert status == 130
    assert re.fullmatch(r"interrupted after \d+ of 1000 steps\n", error)
    assert "throughput" not in output
    loss_fn, params = build(model)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3, weight_decay=0.01), jaxddp.zero1(), jaxddp.data_mesh(2))
    with Checkpoints(tmp_path) as checkpoints:
        state, position = checkpoints.restore(trainer, params)
    assert int(state.step) == position["examples"] >= 1
    assert all(path.name.isdecimal() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "error, status, line",
    [
        (FloatingPointError("loss (=nan) must be finite"), 3, "error: loss (=nan) must be finite\n"),
        (Signalled(signal.SIGTERM), 143, "ended by SIGTERM after 0 of 200 steps\n"),
        (Signalled(signal.SIGUSR1), 138, "ended by SIGUSR1 after 0 of 200 steps\n"),
        (OSError("checkpoint of step 3 was not saved: full"), 2, "error: checkpoint of step 3 was not saved: full\n"),
    ],
)
def test_what_ends_a_run_has_a_status_and_a_line(monkeypatch, capsys, error, status, line):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("jaxddp.cli.train_loop.train", fail)
    assert main(["train"]) == status
    assert capsys.readouterr().err == line


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_signal_ends_a_run_of_any_processes_once_it_is_saved(tmp_path, num_processes, number):
    arguments = f"--steps 100000 --batch-size 2 --model byte_shallow --checkpoint {tmp_path}/ck --log-dir {tmp_path}"
    arguments += f" --processes {num_processes}" if num_processes > 1 else " --devices 1"
    status, output, error = signalled_at_its_first_step(arguments, number)
    output += error
    assert status == 128 + number
    steps = re.findall(rf"ended by {signal.Signals(number).name} after (\d+) of 100000 steps", output)
    assert len(steps) == num_processes and len(set(steps)) == 1
    assert [path.name for path in (tmp_path / "ck").iterdir()] == steps[:1]


def ranks_of(folder):
    """Process ids by rank, of the processes of a job that have this folder in their command."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (path / "cmdline").read_bytes():
                variables = dict(one.partition(b"=")[::2] for one in (path / "environ").read_bytes().split(b"\0"))
                if b"RANK" in variables:
                    found[int(variables[b"RANK"])] = int(path.name)
    return found


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_that_loses_a_process_is_started_again_and_ends_as_one_that_did_not(tmp_path, number):
    arguments = (
        "--processes 2 --model byte_shallow --steps 16 --batch-size 2 --checkpoint-every 4 --eval-batches 1 --resume "
        f"--max-restarts 1 --stuck-s 10 --log-dir {tmp_path}/logs --checkpoint"
    ).split()
    assert subprocess.run([*TRAIN, *arguments, tmp_path / "whole"], timeout=250, check=False).returncode == 0
    lost = tmp_path / "lost"
    with subprocess.Popen([*TRAIN, *arguments, lost], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 200
        while not (lost / "4").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(ranks_of(lost)[1], number)
        _, error = process.communicate(timeout=250)
    assert process.returncode == 0, error
    noticed = r"(is gone|has not answered for 10 s), its last step \d+, its log \S+/rank-1.log"
    assert re.search(rf"jaxddp: process 1 {noticed}: process 0 ends", error)
    assert not ranks_of(lost)
    loss_fn, params = build("byte_shallow")
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3, weight_decay=0.01), jaxddp.bucketed(), jaxddp.data_mesh(1))
    restored = []
    for name in ("whole", "lost"):
        with Checkpoints(tmp_path / name) as checkpoints:
            state, _ = checkpoints.restore(trainer, params)
        assert int(state.step) == 16
        restored.append(trainer.params(state))
    jax.tree.map(np.testing.assert_array_equal, *restored)


@pytest.mark.full
def test_a_folder_that_cannot_be_written_ends_the_run_with_one_line():
    arguments = "--steps 3 --devices 1 --batch-size 1 --model byte_shallow"
    command = [*TRAIN, *arguments.split(), "--checkpoint", "/proc/self/task"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 2
    assert re.fullmatch(r"error: \[Errno \d+\] [^\n]*'/proc/self/task/\.writer'\n", result.stderr)


def test_parser_is_added_by_name():
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    assert parser.parse_args(["train", "--steps", "3"]).steps == 3
