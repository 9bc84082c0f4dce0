import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxddp
from jaxddp import targets
from jaxddp.__main__ import main
from jaxddp.cli import inspect as command
from jaxddp.cli.conftest import assert_refused
from jaxddp.instruments.inspect import Inspection
from jaxddp.instruments.simulate import Bound, simulate
from jaxddp.instruments.testdata import schedule_of
from jaxddp.network import Network, measured
from jaxddp.planning.chips import target
from jaxddp.planning.machine import network_in_words

TINY = "--model tiny --batch-per-device 4"


def inspected(options):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return command.inspected(parser.parse_args(["inspect", *options.split()]))


@pytest.fixture
def asked(monkeypatch):
    """What ``inspect`` is given for some options: the parameters, and the options."""

    def inspect(loss_fn, optimizer, params, batch, strategies, **options):
        return params, options

    monkeypatch.setattr("jaxddp.instruments.inspect.inspect", inspect)
    return lambda *options: inspected(" ".join([TINY, *options]))


def test_bfloat16_is_of_copies_that_the_loss_takes(asked):
    """``test_the_bound_is_below_a_step_that_sends_less_than_the_bytes_of_the_parameters`` compiles such a step."""
    (params, half), (_, whole) = (asked("--dtype", dtype) for dtype in ("bf16", "f32"))
    assert half["compute_dtype"] == "bfloat16" and "compute_dtype" not in whole
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_a_network_is_measured_unless_a_speed_or_a_peak_is_asked_for(asked):
    def words_for(options):
        given = asked(options)[1]
        return network_in_words(target(given["target"]), given["network"])

    assert words_for("") == words_for("--network-file measured")
    assert words_for("--peaks").startswith("network, assumed: 450 GB/s a device as published")
    assert words_for("--target h100:2x4").endswith("between hosts 50 GB/s as published")
    assert words_for("--target h100:2x4 --network-gb-per-s 5").endswith("between hosts 5 GB/s as given")


BAD_INPUT = {
    "--target x100:8": "target 'x100:8' must be like 'h100:8', or 'h100:4x8' for 4 hosts; chips: h100, ",
    "--strategy fast": "unknown strategy 'fast': one of naive, ",
    "--model toy": "argument --model: invalid choice: 'toy' (choose from ",
    "--model tiny --trainer my_module:make": "argument --trainer: not allowed with argument --model",
    "--trace profile --trainer my_module:make": "argument --trainer: not allowed with argument --trace",
    "--trainer my_module:make --dtype bf16": "dtype (=bf16) must be left out with --trainer, whose function decides it",
    "--strategy naive --bucket-mb 5": "bucket_mb (=5) must come with a strategy that takes it, such as bucketed",
    "--write-network file": "write_network (=file) must come with --trace",
    "--dtype bfloat16": "argument --dtype: invalid choice: 'bfloat16' (choose from ",
    "--network-file measured --network-gb-per-s 50": "gb_per_s (=50) must be left out with --network-file",
}


@pytest.mark.parametrize("options", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2_before_anything_is_compiled(options, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("must not compile")

    monkeypatch.setattr("jaxddp.instruments.targets.start_compile_for_target", fail)
    assert_refused(f"inspect {options}", BAD_INPUT[options], capsys)


def test_interrupt_is_one_line_and_status_130_and_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "jaxddp", *"inspect --model lm_9m --compare naive auto".split()]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **piped) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("compiling 4 programs")
            process.send_signal(signal.SIGINT)
            output, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, output, error) == (130, "", "interrupted\n")  # children: targets_test.py
    assert os.listdir(tmp_path) == []


OWN = """
import jax, jax.numpy as jnp, optax

def huge():
    params = {"w": jax.ShapeDtypeStruct((13_970_000_000,), jnp.float32)}  # of which AdamW keeps two more: 12 bytes each
    batch = {"x": jax.ShapeDtypeStruct((8,), jnp.float32)}
    return lambda params, batch: (params["w"].sum() * batch["x"]).mean(), optax.adamw(1e-3), params, batch

def make():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    def loss_fn(params, batch, key):
        hidden = batch["x"] @ params["w"] * jax.random.bernoulli(key, 0.5, (64,))
        return jnp.mean((hidden @ params["v"]) ** 2), {}
    return loss_fn, optax.adamw(1e-3), {"w": shape(32, 64), "v": shape(64, 4)}, {"x": shape(8, 32)}, {"has_aux": True}

def wrong():
    return 1, 2

def unknown():
    return *huge(), {"microbatches": 2}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_training.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_training", None)


def test_a_training_of_ones_own_is_a_table_and_a_picture(own, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(command, "show", show := Mock(side_effect=command.show))
    options = "--trainer own_training:make --compare zero1 --bucket-mb 0.008 --target h100:2 --out pictures"
    assert main(["inspect", *options.split()]) == 0
    (bucketed, zero1), _ = show.call_args.args
    num_bytes = 4 * (32 * 64 + 64 * 4)
    assert bucketed.compiled == [("all-reduce", 4 * 64 * 4), ("all-reduce", 4 * 32 * 64)]
    assert {kind for kind, _ in zero1.compiled} == {"reduce-scatter", "all-gather"}
    for each in (bucketed, zero1):
        assert each.as_planned and each.memory["parameters"] == num_bytes
    assert bucketed.memory["optimizer_state"] == 2 * num_bytes + 4
    assert zero1.memory["optimizer_state"] == num_bytes + 4

    output = capsys.readouterr()
    assert output.err == "" and "network: as measured, XLA's own table" in " ".join(output.out.split())
    rows = [re.split(r"\s{2,}", line) for line in output.out.splitlines()]
    assert [cells[1:4] for cells in rows if cells[0] == "bucketed"] == [["2 AR", "2 AR", "ok"]]
    assert output.out.endswith("\npictures/timeline.png\n")
    (file,) = Path(tmp_path, "pictures").iterdir()
    assert file.name == "timeline.png" and file.read_bytes().startswith(b"\x89PNG")


def test_a_training_that_is_none(own, capsys):
    for options, message in {
        "no_such_module:make": "trainer (=no_such_module:make) must be MODULE:FUNCTION, such as my_module:make: No",
        "own_training:none": "trainer (=own_training:none) must be MODULE:FUNCTION, such as my_module:make: module",
        "own_training": "trainer (=own_training) must give (loss_fn, optimizer, params, batch)",
        "own_training:wrong": "trainer (=own_training:wrong) must give (loss_fn, optimizer, params, batch)",
        "own_training:unknown": "trainer (=own_training:unknown) must give options of jaxddp.Trainer, or a model_state,"
        " not microbatches",
        "own_training:huge": "parameters and optimizer state alone need 167.6 GB on each device of 'h100:8'",
    }.items():
        assert_refused(f"inspect --trainer {options}", message, capsys)


TARGET = targets.target("h100:8")


def inspection(strategy, **changes):
    """A step of the fixtures as if it had been compiled from a model just now."""
    schedule, network = schedule_of(f"gpu-{strategy}-jax0.10"), Network(50, 15)
    simulation = simulate(schedule, TARGET.chip, network)
    memory = {"parameters": 28_992, "peak": 4_460_000_000}
    bound = Bound(simulation.compute_s, 1e-6, 1e-6, 17e-6)
    planned = schedule.gradient_collectives()
    found = Inspection(strategy, TARGET, network, planned, schedule, simulation, bound, memory)
    return dataclasses.replace(found, **changes)


@pytest.fixture
def both():
    return [inspection("bucketed"), inspection("naive"), inspection("auto", planned=[])]


@pytest.fixture
def shown(capsys, monkeypatch):
    def printed(inspections, width=160):
        monkeypatch.setenv("COLUMNS", str(width))
        command.show(inspections, "model")
        return capsys.readouterr().out

    return printed


def test_a_row_holds_what_the_schedule_and_the_simulation_say(both, shown):
    lines = shown(both).splitlines()
    network = "network, assumed: 50 GB/s a device as given, 15 us a call"
    assert lines[0] == f"model on h100:8, in tf32, simulated; {network}"
    assert lines[1] == "rates, assumed: published peaks of products and memory"
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[3:8]]
    assert rows[0] == "strategy planned compiled check volume in late compute comm exposed step step peak".split()
    # Volume, its shares in flight and late; compute, communication, exposed, step; of bound; peak.
    assert [row[:4] for row in rows[2:]] == [
        ["bucketed", "6 AR", "6 AR", "ok"], ["naive", "21 AR", "21 AR", "ok"], ["auto", "-", "1 AR", "-"]
    ]  # fmt: skip
    assert [" ".join(row[4:]) for row in rows[2:]] == [
        "0.0 82% 18% 0.0009 0.1060 0.1054 0.1063 5.595 4.5",
        "0.0 0% 100% 0.0009 0.3310 0.3305 0.3314 17.440 4.5",
        "0.0 0% 100% 0.0005 0.0157 0.0157 0.0161 0.849 4.5",
    ]


@pytest.mark.parametrize("width", [160, 80])
def test_nothing_is_cut_at_any_width(both, width, shown):
    output = shown(both, width)
    lines = output.splitlines()
    assert max(map(len, lines)) <= width
    assert {f"{each.simulation.exposed_s * 1e3:.4f}" for each in both} <= set(output.split())
    assert any(line.split() == ["bucketed", "naive", "auto"] for line in lines) == (width < 120)  # turned


def test_what_was_not_compiled_as_planned_stands_out(both, shown):
    output = shown([dataclasses.replace(both[1], planned=both[1].planned[1:])])
    assert "NOT AS PLANNED" in output and "\nnaive: compiled to other collectives than planned\n" in output


SIZES = (2**8, 2**22)  # bytes, so far apart that the larger takes longer on a busy machine too


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Ten calls on two of the simulated devices: a product and two reductions, one after the other."""
    mesh = jaxddp.data_mesh(2)

    def step(x):
        small = jax.lax.psum(x[: SIZES[0] // 4], "data")
        large = jax.lax.psum(jnp.tanh(x + small.sum()), "data")
        square = large.reshape(1024, 1024)
        return square @ square

    x = jax.ShapeDtypeStruct((SIZES[1] // 4,), jnp.float32)
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)).lower(x).compile()
    given = jnp.ones(x.shape)
    jax.block_until_ready(run(given))
    folder = tmp_path_factory.mktemp("profile")
    with jax.profiler.trace(folder):
        for _ in range(10):
            jax.block_until_ready(run(given))
    return folder


def test_a_profile_of_jax_is_held_against_a_network_and_gives_one(profile, capsys, tmp_path):
    written = tmp_path / "network.json"
    assert main(["inspect", "--trace", str(profile), "--target", "h100:2", "--write-network", str(written)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    devices, kinds, collectives = (
        [line.split() for line in output.out.splitlines() if line.startswith(name) and re.search(r"\d$", line)]
        for name in ("CPU", "products", "all-reduce ")
    )
    assert len(devices) == 2 and int(kinds[0][1]) >= 20
    for *_, span, _, communication, exposed in devices:
        assert 0 < float(exposed) <= float(communication) < float(span)
    sized = [cells for cells in collectives if len(cells) > 3]  # those of the last table
    assert [cells[1:5] for cells in sized] == [["256", "B", "2", "20"], ["4", "MiB", "2", "20"]]
    measured_us = [1e6 * measured("h100:2").seconds("all-reduce", size, range(2)) for size in SIZES]
    assert [float(curve) for *_, curve, _ in sized] == pytest.approx(measured_us, abs=0.06)  # a tenth is printed
    curve = json.loads(written.read_text())["us"]["all-reduce"]["2"]
    assert [size for size, _ in curve] == [*SIZES]

    assert main(["inspect", "--trace", str(profile), "--network-file", str(written)]) == 0
    out = capsys.readouterr().out
    assert f"as measured, {written}" in " ".join(out.split())  # wherever lines are broken
    ratios = [line.split()[-1] for line in out.splitlines() if line.startswith("all-reduce") and "iB" in line]
    assert ratios[-1] == "1.00"

    for machine, said in {
        (): "network, assumed: 25 GB/s a device as given",
        ("--target", "h100:4x8"): "between hosts 25 GB/s as given",
    }.items():
        assert main(["inspect", "--trace", str(profile), "--network-gb-per-s", "25", *machine]) == 0
        assert said in " ".join(capsys.readouterr().out.split())


def test_wrong_options_and_profiles_without_collectives_are_one_line(profile, capsys, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0, "dur": 4, "args": {"device": 0}}
    ]}))  # fmt: skip
    for options, message in {
        ("--trace", tmp_path / "one.json"): "must hold collectives: it has 0.004 ms of products",
        ("--trace", profile, "--write-network", tmp_path / "one.json"): "File exists: ",
    }.items():
        assert main(["inspect", *map(str, options)]) == 2
        output = capsys.readouterr()
        assert output.out == "" and message in output.err and output.err.count("\n") == 1
