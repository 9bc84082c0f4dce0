import importlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from unittest.mock import Mock

import optax
import pytest

import jaxddp
from jaxddp.__main__ import main
from jaxddp.cli.conftest import assert_refused
from jaxddp.cli.train import StepReport, TrainOptions, progress, summary
from jaxddp.models import SIZES, build

BAD_INPUT = {
    "": "the following arguments are required: COMMAND",
    "train --seed -1": "seed (=-1) must be a non-negative integer",
    "train --seed 9223372036854775808": "seed (=9223372036854775808) must be below 2^63",
    "train --devices 3 --batch-size 6 --processes 2": "processes (=2) must divide devices (=3)",
    "train --checkpoint-every -1": "checkpoint_every (=-1) must be a non-negative integer",
    "train --stuck-s 0": "stuck_s (=0.0) must be a positive finite number",
    "train --strategy flat --bucket-mb 3": "strategy 'flat' has no buckets: leave out bucket_mb (=3)",
    "train --nonsense": "unrecognized arguments: --nonsense; see python -m jaxddp --help",
    "train --strategy fast": "unknown strategy 'fast': one of ",
    "train --model tiny": "argument --model: invalid choice: 'tiny' (choose from ",
    "train --model byte_shallow --devices 1 --weights /no/where": "[Errno 2] No such file or directory: '/no/where'",
    "train --data /no/where": "data path '/no/where' must be a regular file",
    "train --devices 3": "batch_size (=32) must be divisible by devices x microbatches (=3 x 1)",
    "train --checkpoint x --processes 2 --max-restarts 1": "max_restarts (=1) must come with resume where there is a ",
    "train --learning-rate nan": "learning_rate (=nan) must be a positive finite number",
    "train --processes 3": "batch_size (=32) must be divisible by devices x microbatches (=3 x 1)",
    "train --optimizer lion": "argument --optimizer: invalid choice: 'lion' (choose from ",
    "train --resume": "resume (=True) must come with checkpoint, the folder to go on from",
    "train --max-restarts 1": "max_restarts (=1) must come with processes",
    "train --checkpoint=": "argument --checkpoint: must not be empty",
    # 16 devices, where this process has started with 8.
    "train --devices 16": "num_ranks (=16) must be at most the number of devices (=8 cpu)",
}


def test_a_job_of_one_process_starts_others_as_no_job_does(monkeypatch):
    """As a shell that salloc opens is one."""
    monkeypatch.setattr("jaxddp.cli.train.launch", lambda command, count, **options: started.append(count))
    monkeypatch.setattr("torchref.cli.train_program.launch", lambda command, count, **options: started.append(count))
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    started = []
    assert (
        main(["train", "--processes=2"])
        == importlib.import_module("torchref.__main__").main(["train", "--devices=2"])
        == 0
    )
    assert started == [2, 2]
    monkeypatch.setattr("jaxddp.cli.train_program.train", lambda options, say: started.append("here"))
    assert main(["train", "--processes=1"]) == 0 and started == [2, 2, "here"]


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(command, capsys):
    assert_refused(command, BAD_INPUT[command], capsys)


def test_every_option_is_a_flag(monkeypatch):
    seen: list[TrainOptions] = []
    monkeypatch.setattr("jaxddp.cli.train_program.train", lambda options, say: seen.append(options))
    monkeypatch.setattr("jaxddp.cli.train.find_job", lambda: type("Job", (), {"process_id": 0, "num_processes": 2}))
    kinds = {one.name: one.metadata for one in fields(TrainOptions) if one.name != "resume"}
    examples = {name: {int: 2, float: 1.5}.get(of["type"], (of["choices"] or ["x"])[-1]) for name, of in kinds.items()}
    everything = examples | {"batch_size": 12, "model": "lm_9m", "resume": True}
    assert len(everything) == 21
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in everything.items() if name != "resume"]
    assert main(["train"]) == main(["train", "--resume", *arguments]) == 0
    assert seen == [TrainOptions(), TrainOptions(**everything)]


def test_program_in_a_pipe_that_cannot_encode_a_path(tmp_path):
    arguments = "--model byte_shallow --devices 2 --steps 6 --batch-size 4 --checkpoint-every 3 --checkpoint".split()
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "jaxddp", "train", *arguments, tmp_path / "ü"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "") and "\\xfc: steps 3, 6\n" in result.stdout
    losses = [float(loss) for loss in re.findall(r"^step \d/6  loss ([\d.]+)  [\d,]+ tokens/s", result.stdout, re.M)]
    assert len(losses) == 6 and losses[0] > 5 and min(losses[1:]) < losses[0] - 1
    assert re.findall(r"^step (\d)/6 .* validation ", result.stdout, re.M) == ["3", "6"]
    summary = dict(re.findall(r"^(\w+(?: time)?)  +(.*)$", result.stdout, re.M))
    size = 4 * SIZES["byte_shallow"].num_params / 2**20
    assert summary["collectives"] == f"planned 2 all-reduce, {size:.1f} MiB per step; compiled: the same"


def test_steps_are_a_line_now_and_then_and_one_for_each_validation():
    options = TrainOptions(steps=100)  # of 128 tokens an example
    reports = [StepReport(step, 6 - step / 100, 2.0 if step == 13 else None, 4) for step in range(1, 101)]
    lines = [line for count in range(1, 101) if (line := progress(options, reports[:count]))]
    assert len(lines) == 20 + 2
    assert lines[0] == "step   1/100  loss 5.990  1,024 tokens/s"
    assert lines[3] == "step  13/100  loss 5.870  1,024 tokens/s  validation 2.000 nats, 2.885 bits per byte"
    collectives = [("all-reduce", 2**20), ("all-reduce", 3 * 2**20)]
    (first, *_) = summary(options, reports, collectives, [("all-reduce", 2**22)], "compiled")
    assert first.endswith("compiled: 1 all-reduce, 4.0 MiB, NOT AS PLANNED")


def signalled_at_its_first_step(arguments, number, framework="jaxddp"):
    """Status, output and errors of a run that gets a signal once its first step is shown."""
    command = [sys.executable, "-m", framework, "train", *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
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


@pytest.mark.full
def test_interrupt_is_one_line_and_status_130_and_what_is_saved_is_whole(tmp_path):
    arguments = "--model byte_shallow --devices 1 --steps 1000 --batch-size 1 --checkpoint-every 1 --resume"
    arguments += f" --checkpoint {tmp_path}"
    status, output, error = signalled_at_its_first_step(arguments, signal.SIGINT)
    assert (status, error) == (130, "interrupted\n") and "throughput" not in output
    loss_fn, params = build("byte_shallow")
    optimizer = optax.adamw(1e-3, weight_decay=0.01)
    trainer = jaxddp.Trainer(loss_fn, optimizer, jaxddp.zero1(), jaxddp.data_mesh(2))
    with jaxddp.Checkpoints(tmp_path) as checkpoints:
        state, position = checkpoints.restore(trainer, params)
    assert int(state.step) == position["examples"] >= 1
    assert all(path.name.isdecimal() for path in tmp_path.iterdir() if path.name != ".writer")


def test_what_ends_a_run_has_a_status_and_a_line(monkeypatch, capsys):
    for error, status, line in (
        (FloatingPointError("loss (=nan) must be finite"), 3, "error: loss (=nan) must be finite\n"),
        (OSError("checkpoint of step 3 was not saved: full"), 2, "error: checkpoint of step 3 was not saved: full\n"),
    ):
        monkeypatch.setattr("jaxddp.cli.train_program.train", Mock(side_effect=error))
        assert main(["train"]) == status
        assert capsys.readouterr().err == line


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(("framework", "num_processes"), [("jaxddp", 1), ("jaxddp", 2), ("torchref", 2)])
def test_a_signal_ends_a_run_of_any_processes_once_it_is_saved(tmp_path, framework, num_processes, number):
    arguments = f"--steps 100000 --batch-size 2 --model byte_shallow --checkpoint {tmp_path}/ck"
    arguments += f" --processes {num_processes}" if num_processes > 1 else " --devices 1"
    status, output, error = signalled_at_its_first_step(arguments, number, framework)
    output += error
    assert status == 128 + number
    steps = re.findall(rf"ended by {signal.Signals(number).name} after (\d+) of 100000 steps", output)
    assert len(steps) == num_processes and len(set(steps)) == 1
    assert [path.name for path in (tmp_path / "ck").glob("[!.]*")] == steps[:1]
