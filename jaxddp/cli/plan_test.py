import json
import os
import re
import signal
import subprocess
import sys

import pytest

from jaxddp import targets
from jaxddp.__main__ import main
from jaxddp.instruments import verify as plan_verification
from jaxddp.instruments.targets import TargetMemoryError
from jaxddp.models import SIZES
from jaxddp.planning.chips import CHIPS

KEYS = (
    "fits bytes_per_device min_devices compute_bound min_tokens best_bucket_mb accumulation_steps "
    "traffic_bytes_per_step best_split tokens devices"
).split()
CUSTOM = "--model custom --width 64 --hidden 256 --layers 2"


def planned(arguments, capsys):
    assert main(["plan", *arguments.split(), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == "" and output.out.count("\n") == 1
    return json.loads(output.out)


def test_the_default_is_the_scaling_book_as_written(capsys):
    default = planned("", capsys)
    assert default == planned("--model xxl --target v5p:64 --fsdp 16 --tp 4 --tokens 25302", capsys)
    assert set(default) >= set(KEYS)
    assert (default["min_tokens"], default["compute_bound"], default["params"]) == (25_302, True, 219_848_638_464)
    assumed = default["assumptions"]
    assert (assumed["passes"], assumed["overlapped_axes"], assumed["ring_factors"]) == ("forward", False, False)
    assert (assumed["flops_per_s"], assumed["link_gb_per_s"]) == (4.6e14, 180)


@pytest.mark.parametrize(
    ("options", "min_tokens"),
    [
        ("--flops-per-s 4.59e14", 25_234), ("--overlapped-axes", 20_445), ("--ring-factors", 22_391),
        ("--link-gb-per-s 90", 66_373), ("--link-gb-per-s 29 --tokens 25302", None),
        ("--with-backward", 23_445),
        ("--fsdp 8 --tp 8", 16_594), ("--dtype float8 --flops-per-s 4.6e14", 11_308),
    ],
)  # fmt: skip
def test_other_assumptions_by_hand(options, min_tokens, capsys):
    """The accounting's cases, and numbers of one byte: F/(2 Y M_X) / (F/(N alpha) - 1/(2 X M_Y))."""
    assert planned(options, capsys)["min_tokens"] == min_tokens


def test_named_transformers_have_their_parameters_and_sequences(capsys):
    for name, config in SIZES.items():
        found = planned(f"--model {name} --target h100:8", capsys)
        assert found["params"] == config.num_params and found["fsdp"] == 8
        assert found["tokens"] % (8 * config.context) == 0 and found["compute_bound"]
    longer = planned("--model seed_xl --target h100:8 --context 1024", capsys)
    assert longer["params"] == SIZES["seed_xl"].num_params and longer["tokens"] % 8192 == 0


def test_shapes_and_machines_by_hand(capsys):
    found = planned(f"{CUSTOM} --target h100:4 --memory-gb 0.0001 --latency-us 0", capsys)
    assert found["params"] == 2 * 64 * 256 * 2 and not found["fits"]
    assert found["bytes_per_device"]["available"] == 100_000 and found["buckets"]["regime"] is None
    assert planned(f"{CUSTOM} --target h100:4 --matrices 3", capsys)["params"] == 3 * 64 * 256 * 2
    whole = f"{CUSTOM} --vocab 100 --heads 4 --context 16 --target h100:4"
    assert planned(whole, capsys)["params"] == 2 * 100 * 64 + 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64
    slow = planned("--model xl --target h100:2x8 --host-link-gb-per-s 1", capsys)
    assert slow["min_tokens"] > 10 * planned("--model xl --target h100:2x8", capsys)["min_tokens"]


def test_a_measured_network_gives_its_rate_and_latency(capsys):
    found = planned("--model seed_xl --target h100:8 --network-file measured", capsys)
    assumed = found["assumptions"]
    assert assumed["link_gb_per_s"] == pytest.approx(402, abs=1) and assumed["latency_us"] == pytest.approx(26.2, abs=1)


def test_precision_stage_and_accumulation(capsys):
    options = "--model seed_xl --target h100:8 --tokens 65536 --accumulation-steps 2"
    found = planned(f"{options} --stage 1 --precision mixed-fp32-sums", capsys)["bytes_per_device"]
    count = SIZES["seed_xl"].num_params
    assert [found[name] for name in ("parameters", "gradients", "optimizer_state")] == [
        2 * count,
        6 * count,
        1.5 * count,
    ]
    summing, gathering = planned(f"{options} --stage 2", capsys), planned(options, capsys)
    assert (summing["assumptions"]["passes"], gathering["assumptions"]["passes"]) == ("backward", "forward")
    assert gathering["assumptions"]["ring_factors"] is True  # on GPUs
    assert gathering["accumulation_steps"] == 2 and gathering["micro_batch"] == 32


OWN = """
import jax, jax.numpy as jnp, optax

def make(optimizer=None):
    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] + params["bias"]) ** 2)
    shapes = {"up": (64, 100), "down": (100, 8), "bias": (8,), "unused": (7,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    return loss_fn, optimizer or optax.adamw(1e-3), params, batch, {"num_microbatches": 2}

def muon():
    return make(optax.contrib.muon(1e-3))

def normalised():
    def loss_fn(params, mean, batch):
        hidden = batch @ params["up"]
        mean_of_all = jax.lax.pmean(hidden.mean(0), "data")
        loss = jnp.mean(((hidden - mean_of_all) @ params["down"]) ** 2)
        return loss, 0.9 * mean + 0.1 * hidden.mean(0)
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {"up": shape(64, 100), "down": shape(100, 8)}
    return loss_fn, optax.adamw(1e-3), params, shape(16, 64), {"has_state": True, "model_state": shape(100)}

def branching():
    def loss_fn(params, batch):
        either = [lambda x: jax.lax.pmean(x, "data"), lambda x: jax.lax.pmean(-x, "data")]
        return jnp.mean(jax.lax.cond(batch.sum() > 0, *either, batch @ params["w"]) ** 2)
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    return loss_fn, optax.sgd(0.1), {"w": shape(64, 10)}, shape(16, 64)

def odd():
    return *make()[:3], jax.ShapeDtypeStruct((6, 64), jnp.float32)
"""
PARAMS, SHARDS = 4 * (6400 + 800 + 8 + 7), 4 * (3200 + 400 + 4 + 4)  # the shards of two ranks are padded
BY_ZERO3 = 4 * (3200 + 800 + 8 + 7)  # which leaves small parameters full
OWN_BYTES = {  # parameters, gradients, and the optimizer's moments with their counter
    0: (PARAMS, PARAMS, 2 * PARAMS + 4),
    1: (PARAMS, PARAMS, 2 * SHARDS + 4),
    2: (PARAMS, SHARDS, 2 * SHARDS + 4),
    3: (BY_ZERO3, BY_ZERO3, 2 * BY_ZERO3 + 4),
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_training.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")  # a narrow terminal turns tables
    yield
    sys.modules.pop("own_training", None)


def test_a_training_of_ones_own_is_planned_at_every_stage(own, capsys):
    found = planned("--trainer own_training:make --target h100:2", capsys)
    assert (found["trainer"], found["target"], found["available"]) == ("own_training:make", "h100:2", 80 * 10**9)
    for stage in found["stages"]:
        held = stage["bytes_per_device"]
        expected = OWN_BYTES[stage["stage"]]
        assert tuple(held[name] for name in ("parameters", "gradients", "optimizer_state")) == expected
        assert held["total"] == sum(expected) and stage["verify"] is stage["refused"] is None
    bucketed, zero1, *_ = found["stages"]
    with_gradient = PARAMS - 4 * 7
    assert bucketed["collectives"] == [{"kind": "all-reduce", "bytes": with_gradient, "count": 1}]
    assert {one["kind"] for one in zero1["collectives"]} == {"reduce-scatter", "all-gather"}
    # A ring of two sends half of a buffer in each direction; zero1 gathers the unused parameter too, in 2 x 4 values.
    assert (bucketed["sent_bytes_per_step"], zero1["sent_bytes_per_step"]) == (with_gradient, with_gradient + 4 * 4)


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2, 3))])
def test_a_training_of_ones_own_is_compiled_as_planned(stage, own, capsys):
    (found,) = planned(f"--trainer own_training:make --target h100:2 --stage {stage} --verify", capsys)["stages"]
    parameters, _, optimizer_state = OWN_BYTES[stage]
    rows = {row["label"]: row for row in found["verify"]["rows"]}
    for label, num_bytes in (("parameters", parameters), ("optimizer state", optimizer_state)):
        assert (rows[label]["planned"], rows[label]["compiled"], rows[label]["check"]) == (num_bytes, num_bytes, "ok")
    kinds = {"all-reduce"} if stage == 0 else {"reduce-scatter", "all-gather"}
    assert {f"{kind} buffers" for kind in kinds} <= rows.keys() and found["verify"]["as_planned"]
    for one in {one["kind"] for one in found["collectives"]}:
        assert rows[f"{one} buffers"]["check"].startswith("ok: ")
    assert rows["peak"]["check"] == "fits in 80.00 GB" and rows["peak"]["compiled"] > parameters + optimizer_state


def test_a_model_with_state_is_compiled_as_planned(own, capsys):
    (found,) = planned("--trainer own_training:normalised --target h100:2 --stage 1 --verify", capsys)["stages"]
    assert found["verify"]["as_planned"] and {one["kind"] for one in found["collectives"]} == {
        "reduce-scatter", "all-gather"
    }  # fmt: skip
    rows = {row["label"]: (row["planned"], row["compiled"]) for row in found["verify"]["rows"]}
    assert rows["all-reduce, model state"] == (400, 400)
    assert rows["all-reduce, loss"] == (800, 800)  # forward and backward


def test_what_a_loss_calls_may_be_compiled_otherwise(own, capsys):
    (found,) = planned("--trainer own_training:branching --target h100:2 --stage 0 --verify", capsys)["stages"]
    (row,) = [row for row in found["verify"]["rows"] if row["label"] == "all-reduce, loss"]
    assert row["planned"] > row["compiled"] and row["check"].startswith("not as traced: 4 planned, ")
    assert row["holds"] is None and found["verify"]["as_planned"]


def test_a_training_of_ones_own_that_is_compiled_otherwise(own, monkeypatch, capsys):
    held = plan_verification.held_bytes
    monkeypatch.setattr(plan_verification, "held_bytes", lambda layout: held(layout)._replace(parameters=8))
    monkeypatch.setattr(plan_verification, "_kind", lambda collective: "all-to-all")
    assert main("plan --trainer own_training:make --target h100:2 --stage 0 --verify".split()) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"parameters 8 {PARAMS:,} NOT AS PLANNED: +{PARAMS - 8:,} bytes" in printed
    assert "28,832 0 NOT AS PLANNED: 1 planned, 0 compiled" in printed
    assert "0 28,832 NOT AS PLANNED: 0 planned, 1 compiled" in printed


def test_a_training_of_ones_own_that_the_compiler_refuses(own, monkeypatch, capsys):
    class Pending:
        def result(self):
            raise TargetMemoryError("too much", "details", needed_bytes=96 * 10**9, available_bytes=95 * 10**9)

    monkeypatch.setattr(targets, "start_compile", lambda *_: Pending())
    (found,) = planned("--trainer own_training:make --target v5p:4 --stage 0 --verify", capsys)["stages"]
    *state, peak = found["verify"]["rows"]
    assert [row["check"] for row in state] == ["not compiled"] * 2
    assert (peak["compiled"], peak["check"]) == (96 * 10**9, "does not fit in 95.00 GB")


def test_stages_that_refuse_a_training_of_ones_own_say_why(own, capsys):
    assert main("plan --trainer own_training:muon --target h100:2".split()) == 0
    bucketed, zero1, zero2, zero3 = [line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert bucketed.startswith("0 bucketed") and bucketed.endswith("1 AR")
    for line, name in ((zero1, "1 zero1 by leaves"), (zero2, "2 zero2 by leaves")):
        assert line.startswith(name) and "2 all-to-all" in line
    assert zero3.startswith("3 zero3 refused: optimizer must be element-wise to be sharded")


@pytest.mark.full
def test_stages_by_leaves_are_compiled_as_planned(own, capsys):
    (found,) = planned("--trainer own_training:muon --target h100:2 --stage 1 --verify", capsys)["stages"]
    rows = {row["label"]: row for row in found["verify"]["rows"]}
    assert found["verify"]["as_planned"] and rows["all-to-all buffers"]["check"].startswith("ok: ")
    assert found["bytes_per_device"]["optimizer_state"] == rows["optimizer state"]["compiled"]


def test_a_training_of_ones_own_that_no_stage_takes(own, capsys):
    for command, said in (
        ("own_training:muon --stage 3", "error: optimizer must be element-wise to be sharded: "),
        ("own_training:odd --target h100:4", "error: batch (=6 examples) must be divisible by "),
    ):
        assert main(["plan", "--trainer", *command.split()]) == 2
        assert capsys.readouterr().err.startswith(said)


BAD_INPUT = {
    "--model toy": "unknown model 'toy': one of xxl, custom, tiny, ",
    "--width 3": "--width must come with --model custom, not with 'xxl'",
    "--model xl --heads 3": "--heads must come with --model custom, not with 'xl'",
    "--model custom --width 3": "--model custom needs --hidden, --layers as well",
    f"{CUSTOM} --vocab 3": "--model custom needs --heads, --context as well",
    f"{CUSTOM} --matrices 4": "num_matrices (=4) must be 2 or 3",
    "--model custom --width 0 --hidden 4 --layers 2": "width (=0) must be a positive integer",
    "--target v5p:12": "target 'v5p:12' makes no torus: ",
    "--fsdp 3": "fsdp x tp (=3 x 1) must divide the 64 devices of v5p:64",
    "--fsdp 0": "fsdp (=0) must be a positive integer",
    "--tp 32": "tokens must be given: with tp (=32) no batch is compute-bound",
    "--tokens 0": "tokens (=0) must be a positive integer",
    "--tokens 3": "tokens (=3) must be at least sequence length x data ranks x accumulation steps (=1 x 16 x 1)",
    "--model xl --tokens 8193 --target h100:8": "tokens (=8193) must be a multiple of sequence length x data ranks x ",
    "--tokens many": "argument --tokens: invalid int value: 'many'; see python -m jaxddp plan --help",
    "--stage 4": "stage (=4) must be one of 0, 1, 2, 3",
    "--accumulation-steps 0": "accumulation_steps (=0) must be a positive integer",
    "--dtype text": "dtype (='text') must be a name with a width, like 'float32'",
    "--dtype float16": "dtype (='float16') has no published peak on v5p: give --flops-per-s",
    "--precision half": "argument --precision: invalid choice: 'half' (choose from ",
    "--flops-per-s 0": "flops_per_s (=0.0) must be a positive finite number",
    "--memory-gb -1": "memory_bytes (=-1000000000.0) must be a positive finite number",
    "--link-gb-per-s inf": "link_gb_per_s (=inf) must be a positive finite number",
    "--host-link-gb-per-s 5": "host_link_gb_per_s (=5.0) must be left out for 'v5p:64', which is one torus",
    "--trainer a:b --model small": "model (=small) must be left out with --trainer, which says what is trained",
    "--trainer a:b --verify --tokens 7": "tokens (=7) must be left out with --trainer, which says what is trained",
    "--trainer a:b --stage 4": "stage (=4) must be one of 0, 1, 2, 3",
    "--trainer nowhere:make": "trainer (=nowhere:make) must name a module that can be imported from here: ",
    "--latency-us -1": "latency_us (=-1.0) must be a finite number of microseconds, 0 or more",
    "--model seed_xl --verify": "verify must come with --trainer",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(command, capsys):
    try:
        status = main(["plan", *command.split()])
    except SystemExit as ended:  # argparse's way
        status = ended.code
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    assert output.err.startswith(f"error: {BAD_INPUT[command]}")
    assert output.err.count("\n") == 1 and output.err.endswith("\n")


def test_help_is_quick_and_lists_every_chip_and_option():
    code = (
        "import sys; from jaxddp.__main__ import main\n"
        "try: main(['plan', '--help'])\n"
        "finally: print([name for name in ('jax', 'flax', 'rich', 'jaxddp.models') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *words, imported = result.stdout.splitlines()
    assert imported == "[]"
    assert set(re.findall(r"[\w.]+", " ".join(words))) >= {*CHIPS, "seed_xl", "MiB", "custom", "xxl"}


def test_interrupt_is_one_line_and_status_130():
    """Sent from inside, as soon as there is something to interrupt."""
    code = (
        "import os, signal, sys, jaxddp.planning.plan as planning\n"
        "planning.plan = lambda job: os.kill(os.getpid(), signal.SIGINT) or [0 for _ in iter(int, 1)]\n"
        "from jaxddp.__main__ import main; sys.exit(main(['plan']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ}, check=False
    )
    assert signal.SIGINT == 2 and (process.returncode, process.stdout, process.stderr) == (130, "", "interrupted\n")


def test_only_the_example_has_its_own_grid(capsys):
    found = planned("--model custom --width 1024 --hidden 4096 --layers 8", capsys)
    assert found == planned("--model custom --width 1024 --hidden 4096 --layers 8 --target v5p:64 --tp 1", capsys)


@pytest.mark.parametrize("stage", [1, 2])
def test_updated_parameters_are_gathered_in_their_own_dtype(stage, capsys):
    """Gradients in 2 bytes, float32 parameters in 4: the reduce-scatter and the all-gather of 7/8 of each."""
    found = planned(f"--model small --target h100:8 --stage {stage}", capsys)
    assert found["traffic_bytes_per_step"]["zero1"] == (2 + 4) * found["params"] * 7 / 8
