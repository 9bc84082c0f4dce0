import json

import pytest

from jaxddp.__main__ import main
from jaxddp.cli.conftest import assert_refused
from jaxddp.models import SIZES

KEYS = set(
    "fits bytes_per_device min_devices compute_bound min_tokens best_bucket_mb accumulation_steps "
    "traffic_bytes_per_step best_split tokens devices".split()
)
CUSTOM = "--model custom --width 64 --hidden 256 --layers 2"


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
    assert (assumed["passes"], assumed["overlapped_axes"], assumed["ring_factors"]) == ("forward", False, False)
    assert (assumed["flops_per_s"], assumed["link_gb_per_s"]) == (4.6e14, 180)
    other = "--model custom --width 1024 --hidden 4096 --layers 8"  # has no grid of its own
    assert planned(other, capsys) == planned(f"{other} --target v5p:64 --tp 1", capsys)


@pytest.mark.parametrize(
    ("options", "min_tokens"),
    [
        ("--flops-per-s 4.59e14", 25_234),
        ("--link-gb-per-s 90", 66_373), ("--link-gb-per-s 29 --tokens 25302", None),
        ("--fsdp 8 --tp 8", 16_594), ("--dtype float8 --flops-per-s 4.6e14", 11_308),
    ],
)  # fmt: skip
def test_other_assumptions_by_hand(options, min_tokens, capsys):
    """The accounting's cases, and numbers of one byte: F/(2 Y M_X) / (F/(N alpha) - 1/(2 X M_Y))."""
    assert planned(options, capsys)["min_tokens"] == min_tokens


def test_named_transformers_have_their_parameters_and_sequences(capsys):
    found = planned("--model seed_xl --target h100:8 --context 1024", capsys)
    assert found["params"] == SIZES["seed_xl"].num_params and found["fsdp"] == 8
    assert found["tokens"] % 8192 == 0 and found["compute_bound"]


def test_shapes_and_machines_by_hand(capsys):
    found = planned(f"{CUSTOM} --target h100:4 --memory-gb 0.0001 --latency-us 0", capsys)
    assert found["params"] == 2 * 64 * 256 * 2 and not found["fits"]
    assert found["bytes_per_device"]["available"] == 100_000 and found["buckets"] is None
    whole = f"{CUSTOM} --vocab 100 --heads 4 --context 16 --target h100:4"
    assert planned(whole, capsys)["params"] == 2 * 100 * 64 + 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64
    slow = planned("--model xl --target h100:2x8 --host-link-gb-per-s 1", capsys)
    assert slow["min_tokens"] > 10 * planned("--model xl --target h100:2x8", capsys)["min_tokens"]


def test_a_measured_network_gives_its_rate_and_latency(capsys):
    assumed = planned("--model seed_xl --target h100:8 --network-file measured", capsys)["assumptions"]
    assert (assumed["link_gb_per_s"], assumed["latency_us"]) == pytest.approx((402, 47.4), abs=1)  # 51.9 us for 1 MiB
    assert assumed == planned("--model seed_xl --target h100:8", capsys)["assumptions"]
    assert planned("--model seed_xl --target h100:8 --peaks", capsys)["assumptions"]["link_gb_per_s"] == 450


def test_precision_stage_and_accumulation(capsys):
    options = "--model seed_xl --target h100:8 --tokens 65536 --accumulation-steps 2"
    found = planned(f"{options} --stage 1 --precision mixed-fp32-sums", capsys)
    held, count = found["bytes_per_device"], SIZES["seed_xl"].num_params
    state = [held[name] for name in ("parameters", "gradients", "optimizer_state")]
    assert state == [2 * count, 6 * count, 1.5 * count]
    assert (found["assumptions"]["passes"], found["assumptions"]["ring_factors"]) == ("backward", True)
    assert found["accumulation_steps"] == 2 and found["micro_batch"] == 32
    # Gradients in 2 bytes, float32 parameters in 4: the reduce-scatter and the all-gather of 7/8 of each.
    for stage in (1, 2):
        found = planned(f"--model small --target h100:8 --stage {stage}", capsys)
        assert found["traffic_bytes_per_step"]["zero1"] == (2 + 4) * found["params"] * 7 / 8


BAD_INPUT = {
    "--model toy": "unknown model 'toy': one of xxl, custom, tiny, ",
    "--model custom --width 3": "--model custom needs --hidden, --layers as well",
    "--target v5p:12": "target 'v5p:12' makes no torus: ",
    "--fsdp 3": "fsdp x tp (=3 x 1) must divide the 64 devices of v5p:64",
    "--tp 32": "tokens must be given: with tp (=32) no batch is compute-bound",
    "--model xl --tokens 8193 --target h100:8": "tokens (=8193) must be a multiple of sequence length x data ranks x ",
    "--dtype float16": "dtype (='float16') has no published peak on v5p: give --flops-per-s",
    "--attention flash": "--attention must come with a transformer, not with feed-forward blocks",
    "--model xl --checkpointing some": "checkpointing (='some') must be one of none, selective, full",
    "--host-link-gb-per-s 5": "host_gb_per_s (=5.0) must be left out for 'v5p:64', which is one torus",
    "--target h100:8 --network-file measured --link-gb-per-s 5": "gb_per_s (=5) must be left out with --network-file",
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
