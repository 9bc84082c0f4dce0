import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxddp.__main__ import main
from jaxddp.cli.conftest import assert_refused
from jaxddp.planning.chips import CHIPS

INSPECT = [sys.executable, "-m", "jaxddp", "inspect"]
SHAPES = "--layers 1 --width 32 --heads 2 --hidden 64 --vocab 128 --context 16"
CUSTOM = f"--model custom {SHAPES} --batch-per-device 4"
TOO_LARGE = "--model custom --layers 3 --width 16384 --heads 8 --hidden 72700 --vocab 1000 --context 128"


def as_json(capsys, *arguments):
    """What the command prints of these arguments."""
    assert main(["inspect", "--json", *" ".join(map(str, arguments)).split()]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("inspect")


@pytest.fixture(scope="module")
def printed(folder):
    """What is printed for a small model in several buckets, and left to XLA; its files are in the folder."""
    options = "--bucket-mb 0.03 --compare auto --json --dump-hlo own.hlo --out pictures"
    command = [*INSPECT, *CUSTOM.split(), *options.split()]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_json_is_one_object_with_every_key(printed):
    assert printed.count("\n") == 1
    found = json.loads(printed)
    all_found = [found, *found["compare"]]
    assert [each["strategy"] for each in all_found] == ["bucketed", "auto"]
    for each in all_found:
        assert (each["target"], each["devices"]) == ("h100:8", 8)
        assert each["network"].startswith("network: as measured, XLA's own table")
        assert all(set(collective) == {"kind", "bytes"} for collective in each["planned"] + each["compiled"])
        compiled = sorted((collective["kind"], collective["bytes"]) for collective in each["compiled"])
        planned = sorted((collective["kind"], collective["bytes"]) for collective in each["planned"])
        assert each["step_ms"] == pytest.approx(each["compute_ms"] + each["exposed_ms"], rel=1e-12)  # by definition
        if each["strategy"] == "auto":
            assert sum(num_bytes for _, num_bytes in compiled) == 74_112 + 4  # the loss travels with the gradients
            assert (planned, each["as_planned"]) == ([], None)
        else:
            assert sum(num_bytes for _, num_bytes in compiled) == 74_112
            assert planned == compiled and each["as_planned"] is True
    assert len({each["lower_bound_ms"] for each in all_found}) == 1
    late = {each["strategy"]: each["bytes_started_after_backward"] for each in all_found}
    assert 0 < late["bucketed"] < 74_112


def test_pictures_and_trace_are_written(printed, folder):
    files = {path.name: path.read_bytes() for path in Path(folder, "pictures").iterdir()}
    assert set(files) == {"timeline.png", "timeline.svg", "trace.json"}
    assert files["timeline.png"].startswith(b"\x89PNG") and b"<svg" in files["timeline.svg"]
    for strategy in ("bucketed", "auto"):
        assert strategy.encode() in files["timeline.svg"]
    assert json.loads(files["trace.json"])["traceEvents"]


def test_a_dump_is_read_back_to_the_same_step(printed, folder, capsys):
    ours, theirs = json.loads(printed), as_json(capsys, "--hlo", folder / "own.hlo")
    for key in ("compiled", "step_ms", "compute_ms", "comm_ms", "exposed_ms", "first_start_fraction", "target"):
        assert theirs[key] == ours[key]
    assert theirs["strategy"] == "own.hlo" and theirs["lower_bound_ms"] is theirs["memory"] is None


def test_bfloat16_is_of_copies_that_the_loss_takes(monkeypatch, capsys):
    """``test_the_bound_is_below_a_step_that_sends_less_than_the_bytes_of_the_parameters`` compiles such a step."""
    asked = []
    monkeypatch.setattr("jaxddp.instruments.inspect.inspect_steps", lambda *args, **options: asked.append(args[1]))
    monkeypatch.setattr("jaxddp.cli.inspect_console.as_json", lambda found: None)
    for dtype in ("bf16", "f32"):
        assert as_json(capsys, CUSTOM, "--dtype", dtype) is None
    half, whole = asked
    assert (half.options, whole.options) == ({"compute_dtype": jnp.bfloat16}, {})
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("float32")}


def test_several_hosts_take_the_given_network_between_them(folder, printed, capsys):
    all_arguments = "h100:8", "h100:2x4", "h100:2x4 --network-gb-per-s 5", "h100:2x4 --latency-us 0"
    found = {one: as_json(capsys, "--hlo", folder / "own.hlo --peaks --target", one) for one in all_arguments}
    speeds = [each["network_gb_per_s"] for each in found.values()]
    assert speeds == [CHIPS["h100"].link_gb_per_s, CHIPS["h100"].host_link_gb_per_s, 5.0, 50.0]
    comm_ms = {arguments: each["comm_ms"] for arguments, each in found.items()}
    assert comm_ms["h100:8"] < comm_ms["h100:2x4"] < comm_ms["h100:2x4 --network-gb-per-s 5"]
    # Calls for the buckets and for the metrics, of 15 us each; 1e-12 for the rounding of sums.
    num_calls = len(json.loads(printed)["planned"]) + 1
    assert num_calls > 3
    assert comm_ms["h100:2x4"] - comm_ms["h100:2x4 --latency-us 0"] == pytest.approx(0.015 * num_calls, rel=1e-12)
    assert found["h100:2x4"]["notes"] == []
    assert as_json(capsys, "--hlo", folder / "own.hlo", "--target h100:2x8")["notes"] == [
        "compiled for 8 devices, not for the 16 of h100:2x8: its collectives are simulated among those"
    ]


def test_a_network_is_measured_unless_a_speed_or_a_peak_is_asked_for(folder, capsys):
    all_options = "", "--network-file measured", "--latency-us 15", "--peaks", "--target h100:2x4"
    found = {one: as_json(capsys, "--hlo", folder / "own.hlo", one) for one in all_options}
    assert found[""] == found["--network-file measured"] and found[""]["notes"] == []
    assert found["--latency-us 15"]["network"] == found["--peaks"]["network"]
    assert found["--peaks"]["network"].startswith("network, assumed: 450 GB/s a device as published")
    assert found[""]["comm_ms"] > 3 * found["--peaks"]["comm_ms"] / 2  # small calls take longer than 15 us
    over_hosts = found["--target h100:2x4"]
    assert over_hosts["network"].endswith("between hosts 50 GB/s as published")
    assert any("all-reduce between hosts was not measured" in note for note in over_hosts["notes"])


BAD_INPUT = {
    "--target x100:8": "target 'x100:8' is of an unknown chip 'x100': one of h100, ",
    "--network-gb-per-s 0": "network gb_per_s (=0.0) must be a positive finite number",
    "--latency-us -1": "latency_us (=-1.0) must be a finite number of microseconds, 0 or more",
    "--batch-per-device 0": "batch_per_device (=0) must be a positive integer",
    "--strategy fast": "unknown strategy 'fast': one of auto, naive, ",
    "--model toy": "unknown model 'toy': one of custom, tiny, ",
    "--layers 3": "--layers must come with --model custom, not with 'seed_xl'",
    "--model custom --layers 2 --width 32": "--model custom needs --heads, --hidden, --vocab, --context as well",
    f"{CUSTOM} --heads 3": "width (=32) must be divisible by num_heads (=3)",
    "--bucket-mb text": "argument --bucket-mb: invalid float value: 'text'; see python -m jaxddp ",
    "--bucket-mb 3 --strategy flat": "bucket_mb (=3.0) must come with one of bucketed, zero1, zero2, not 'flat'",
    "--out {full}": "out (={full}) must not exist, or be an empty folder: nothing is overwritten",
    "--dump-hlo {full}/file": "dump_hlo (={full}/file) must not exist: nothing is overwritten",
    "--hlo {full}/file --compare auto": "compare (=['auto']) must be left out with --hlo, which is one program",
    "--dtype bfloat16": "argument --dtype: invalid choice: 'bfloat16' (choose from ",
    "--network-file measured --network-gb-per-s 50": "gb_per_s (=50) must be left out with --network-file",
    "--hlo {full}/no": "[Errno 2] No such file or directory: '{full}/no'",
    # 13.97e9 float32 parameters, of which AdamW keeps two more: 12 bytes each.
    TOO_LARGE: "parameters and optimizer state alone need 167.7 GB on each device of 'h100:8', which has 80.0 GB: ",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2_before_anything_is_compiled(command, capsys, monkeypatch, tmp_path):
    def fail(*arguments, **options):
        raise AssertionError("must not compile")

    monkeypatch.setattr("jaxddp.instruments.targets.start_compile_for_target", fail)
    monkeypatch.chdir(tmp_path)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("kept")
    assert_refused(f"inspect {command}".format(full=full), BAD_INPUT[command].format(full=full), capsys)
    assert (full / "file").read_text() == "kept" and os.listdir(tmp_path) == ["full"]


def test_foreign_text_is_one_line(tmp_path, capsys):
    (tmp_path / "x.hlo").write_bytes(bytes(range(256)))
    assert_refused(f"inspect --hlo {tmp_path}/x.hlo --out {tmp_path}/out", "text (=", capsys)
    assert os.listdir(tmp_path) == ["x.hlo"]


def test_interrupt_is_one_line_and_status_130_and_leaves_no_process(tmp_path):
    arguments = "--model lm_9m --compare naive flat".split()
    with subprocess.Popen(
        [*INSPECT, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
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

def make():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    def loss_fn(params, batch, key):
        hidden = batch["x"] @ params["w"] * jax.random.bernoulli(key, 0.5, (64,))
        return jnp.mean(hidden ** 2), {}
    return loss_fn, optax.adamw(1e-3), {"w": shape(32, 64)}, {"x": shape(8, 32)}, {"has_aux": True}

def wrong():
    return 1, 2
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_training.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_training", None)


def test_a_training_of_ones_own(own, capsys):
    naive = as_json(capsys, "--trainer own_training:make --strategy naive --compare zero1 --target h100:2")
    (zero1,) = naive["compare"]
    num_bytes = 4 * 32 * 64
    assert [(one["kind"], one["bytes"]) for one in naive["compiled"]] == [("all-reduce", num_bytes)]
    assert {one["kind"] for one in zero1["compiled"]} == {"reduce-scatter", "all-gather"}
    for each in (naive, zero1):
        assert each["as_planned"] and each["memory"]["parameters"] == num_bytes
        assert each["memory"]["batch"] == 4 * 8 * 32 // 2
    assert naive["memory"]["optimizer_state"] == 2 * num_bytes + 4
    assert zero1["memory"]["optimizer_state"] == num_bytes + 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("own_training", "trainer (=own_training) must be MODULE:FUNCTION, such as my_module:make"),
        ("no_such_module:make", "trainer (=no_such_module:make) must name a module that can be imported from here"),
        ("own_training:none", "trainer (=own_training:none) must name a function of the module"),
        ("own_training:wrong", "trainer (=own_training:wrong) must give (loss_fn, optimizer, params, batch)"),
        ("own_training:make --batch-per-device 4", "batch_per_device (=4) must be left out with --trainer"),
    ],
)
def test_a_training_that_is_none(options, message, own, capsys):
    assert_refused(f"inspect --trainer {options} --json", message, capsys)
