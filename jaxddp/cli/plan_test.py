import json

import pytest

from jaxddp.__main__ import main
from jaxddp.cli.conftest import assert_refused
from jaxddp.cli.plan import as_text
from jaxddp.models import SIZES
from jaxddp.planning.chips import target
from jaxddp.planning.machine import machine_of
from jaxddp.planning.plan import TrainingJob, plan
from jaxddp.planning.plan_test import XL, XXL

KEYS = set(
    "fits bytes_per_device min_devices compute_bound min_tokens best_bucket_mb accumulation_steps "
    "traffic_bytes_per_step best_split tokens devices".split()
)
CUSTOM = "--model custom --width 64 --hidden 256 --layers 2 --vocab 100 --heads 4 --context 16"


def planned(arguments, capsys):
    assert main(["plan", *arguments.split(), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == "" and output.out.count("\n") == 1
    return json.loads(output.out)


def test_the_default_is_the_scaling_book_as_written(capsys):
    default = planned("", capsys)
    assert default == planned("--model xxl --target v5p:64 --fsdp 16 --tp 4 --tokens 25302", capsys)
    assert set(default) >= KEYS
    assert (default["min_tokens"], default["compute_bound"], default["params"]) == (25_302, True, 219_848_638_464)
    assumed = default["assumptions"]
    assert (assumed["passes"], assumed["ring_factors"]) == ("forward", False)
    assert (assumed["flops_per_s"], assumed["link_gb_per_s"]) == (4.6e14, 180)
    assert planned(CUSTOM, capsys) == planned(f"{CUSTOM} --target v5p:64 --tp 1", capsys)  # has no grid of its own


def test_other_assumptions_by_hand(capsys):
    """The accounting's cases, and numbers of one byte: F/(2 Y M_X) / (F/(N alpha) - 1/(2 X M_Y))."""
    for options, min_tokens in {
        "--flops-per-s 4.59e14": 25_234, "--link-gb-per-s 90": 66_373, "--link-gb-per-s 29 --tokens 25302": None,
        "--fsdp 8 --tp 8": 16_594, "--dtype float8 --flops-per-s 4.6e14": 11_308,
    }.items():  # fmt: skip
        assert planned(options, capsys)["min_tokens"] == min_tokens


def test_named_transformers_have_their_parameters_and_sequences(capsys):
    found = planned("--model seed_xl --target h100:8 --context 1024", capsys)
    assert found["params"] == SIZES["seed_xl"].num_params and found["fsdp"] == 8
    assert found["tokens"] % 8192 == 0 and found["compute_bound"]


def test_shapes_and_machines_by_hand(capsys):
    found = planned(f"{CUSTOM} --target h100:4 --memory-gb 0.0001", capsys)
    assert found["params"] == 2 * 100 * 64 + 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64 and not found["fits"]
    assert found["bytes_per_device"]["available"] == 100_000
    slow = planned("--model xl --target h100:2x8 --host-link-gb-per-s 1", capsys)
    assert slow["min_tokens"] > 10 * planned("--model xl --target h100:2x8", capsys)["min_tokens"]


def test_a_measured_network_gives_its_rate_and_latency(capsys):
    assumed = planned("--model seed_xl --target h100:8 --network-file measured", capsys)["assumptions"]
    assert (assumed["link_gb_per_s"], assumed["latency_us"]) == pytest.approx((402, 47.4), abs=1)  # 51.9 us for 1 MiB
    assert assumed == planned("--model seed_xl --target h100:8", capsys)["assumptions"]
    assert planned("--model seed_xl --target h100:8 --peaks", capsys)["assumptions"]["link_gb_per_s"] == 450


def test_precision_and_stage(capsys):
    options = "--model seed_xl --target h100:8 --tokens 65536"
    found = planned(f"{options} --stage 1 --precision mixed-fp32-sums", capsys)
    held, count = found["bytes_per_device"], SIZES["seed_xl"].num_params
    state = [held[name] for name in ("parameters", "gradients", "optimizer_state")]
    assert state == [2 * count, 6 * count, 1.5 * count]
    assert (found["assumptions"]["passes"], found["assumptions"]["ring_factors"]) == ("backward", True)
    # Gradients in 2 bytes, float32 parameters in 4: the reduce-scatter and the all-gather of 7/8 of each.
    for stage in (1, 2):
        found = planned(f"--model small --target h100:8 --stage {stage}", capsys)
        assert found["traffic_bytes_per_step"]["zero1"] == (2 + 4) * found["params"] * 7 / 8
    # Their backward scatters what stage 0 all-reduces, zero2's that of every micro-batch.
    least = [planned(f"--model xl --target h100:8 --stage {stage}", capsys)["min_tokens"] for stage in (0, 1, 2)]
    assert least[1] == least[2] == pytest.approx(least[0] / 2, abs=1)
    alone = "--model xl --target h100:8 --stage 1 --fsdp 1"  # replicas, which share nothing
    assert planned(alone, capsys)["min_tokens"] == least[0]
    for stage, memory_gb, is_compute_bound in ((1, 20.3, True), (2, 13.3, False)):  # what fits in six micro-batches
        options = f"--model xl --target h100:8 --tokens 24576 --stage {stage} --memory-gb {memory_gb}"
        found = planned(options, capsys)
        assert (found["accumulation_steps"], found["compute_bound"]) == (6, is_compute_bound)


BAD_INPUT = {
    "--model toy": "argument --model: invalid choice: 'toy' (choose from",
    "--model custom --width 3": "--model custom needs --vocab, --context, --layers, --heads, --hidden as well",
    "--target v5p:12": "target 'v5p:12' makes no torus: ",
    "--fsdp 3": "fsdp x tp (=3 x 1) must divide the 64 devices of v5p:64",
    "--tp 32": "tokens must be given: with tp (=32) no batch is compute-bound",
    "--model xl --tokens 8193 --target h100:8": "tokens (=8193) must be at least sequence length x data ranks (=128 x ",
    "--dtype float16": "dtype (='float16') has no published peak on v5p: give --flops-per-s",
    "--attention flash": "sizes, attention and checkpointing must come with a transformer, ",
    "--flops-per-s 5e-324": "Out of range float values are not JSON compliant",
    "--checkpointing some": "argument --checkpointing: invalid choice: 'some'",
    "--target h100:8 --network-file measured --link-gb-per-s 5": "gb_per_s (=5) must be left out with ",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(command, capsys):
    assert_refused(f"plan {command}", BAD_INPUT[command], capsys)


def test_attention_checkpointing_and_rates(capsys):
    options = "--model xl --target h100:8 --context 1024 --tokens 65536"
    square, flash, peaks = (planned(f"{options}{more}", capsys) for more in ("", " --attention flash", " --peaks"))
    full = planned(f"{options} --attention flash --checkpointing full", capsys)
    kept = [one["bytes_per_device"]["activations"] for one in (square, flash, full)]
    assert kept[0] > kept[1] > kept[2] and square["step_s"]["step_s"] > flash["step_s"]["step_s"]
    assert peaks["assumptions"]["flops_per_s"] == 989.4e12 > square["assumptions"]["flops_per_s"]
    assert "by shape" in square["assumptions"]["rates"] and "assumed" in peaks["assumptions"]["rates"]


def machine(spec):
    return machine_of(target(spec), "bfloat16")


PLANS = {
    "book": plan(TrainingJob(XXL, *machine("v5p:64"), fsdp=16, tp=4)),
    "too large": plan(TrainingJob(XXL, *machine("h100:8"), fsdp=8, tokens=10_000)),
    "no batch": plan(TrainingJob(XXL, *machine("v5p:64"), fsdp=2, tp=32, tokens=10_000)),
    "alone": plan(TrainingJob(XXL, *machine("h100:8"), fsdp=1, tp=8)),
    "small torus": plan(TrainingJob(XL, *machine("v5p:8"), fsdp=8, tokens=2**21, sequence_length=128)),
}


def text_of(name):
    return as_text({"model": "model", **PLANS[name]})


def test_the_book_as_a_reader_sees_it():
    text = text_of("book")
    assert text.startswith("model on v5p:64\n\n")
    found = {" ".join(line.split()) for line in text.splitlines()}
    assert found >= {
        "fits yes", "total 70.29 GB", "available 95.00 GB", "activations 11.83 GB", "accumulation steps 1",
        "min devices 48", "compute bound yes", "min tokens 25,302", "compute 377.9 ms", "tokens 16,594",
        "zero3 309.16 GB", "flops 460 TFLOP/s", "link 180 GB/s", "latency 15 us", "passes forward",
    }  # fmt: skip
    assert "Note" not in text


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_json_and_agrees_with_itself(name):
    found = PLANS[name]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    parts = dict(found["bytes_per_device"])
    total, available = parts.pop("total"), parts.pop("available")
    assert abs(sum(parts.values()) - total) <= len(parts)  # each is rounded up
    assert found["fits"] == (total < available)
    assert (found["best_bucket_mb"] is None) == (found["buckets"] is None) == (name == "alone")


def test_what_a_reader_must_know_is_said():
    for name, said in (
        ("too large", "fits no"),
        ("too large", "accumulation steps none"),
        ("too large", "Note: JAX takes 60.00 GB of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."),
        ("no batch", "min tokens none"),
        ("alone", "buckets none"),
        ("small torus", "Note: axes of fewer than 4 chips have no wrap-around links: "),
    ):
        assert said in " ".join(text_of(name).split())
