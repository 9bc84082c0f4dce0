"""What ``plan`` says where options are left at their defaults."""

import json

import pytest

from jaxddp.__main__ import main


def planned(arguments, capsys):
    assert main(["plan", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_only_the_example_has_its_own_grid(capsys):
    found = planned("--model custom --width 1024 --hidden 4096 --layers 8", capsys)
    assert found == planned("--model custom --width 1024 --hidden 4096 --layers 8 --target v5p:64 --tp 1", capsys)


@pytest.mark.parametrize("stage", [1, 2])
def test_updated_parameters_are_gathered_in_their_own_dtype(stage, capsys):
    """Gradients in 2 bytes, float32 parameters in 4: the reduce-scatter and the all-gather of 7/8 of each."""
    found = planned(f"--model small --target h100:8 --stage {stage}", capsys)
    assert found["traffic_bytes_per_step"]["zero1"] == (2 + 4) * found["params"] * 7 / 8


@pytest.mark.full  # plan_test.py verifies a plan of feed-forward layers
@pytest.mark.parametrize(("model", "stage"), [("tiny", 1), ("small", 1), ("small", 2)])
def test_a_transformer_holds_on_gpus(model, stage, capsys):
    assert main(f"plan --model {model} --target h100:8 --stage {stage} --verify --json".split()) == 0
    rows = json.loads(capsys.readouterr().out)["verify"]["rows"]
    assert len(rows) > 4 and not [row for row in rows if row["check"].startswith("NOT AS PLANNED")]
