import io
import json
import math
from collections import Counter

import pytest

from jaxddp.cli.plan_console import as_json, show, show_verification, verification_object
from jaxddp.instruments.targets import TargetMemoryError
from jaxddp.instruments.verify import Row, Verification
from jaxddp.planning.chips import target
from jaxddp.planning.cost.scaling import Assumptions
from jaxddp.planning.cost.workload import feed_forward, transformer
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.plan import TrainingJob, plan

XXL = feed_forward(width=16384, hidden=53248, num_blocks=126)
XL = transformer(vocab=10_000, context=128, width=768, num_layers=16, num_heads=12, hidden=3200)


def cluster(spec):
    return cluster_of(target(spec), "bfloat16")


PLANS = {
    "book": plan(TrainingJob(XXL, cluster("v5p:64"), fsdp=16, tp=4)),
    "too large": plan(TrainingJob(XXL, cluster("h100:8"), fsdp=8, tokens=10_000)),
    "no batch": plan(TrainingJob(XXL, cluster("v5p:64"), fsdp=2, tp=32, tokens=10_000)),
    "alone": plan(TrainingJob(XXL, cluster("h100:8"), fsdp=1, tp=8)),
    "small torus": plan(
        TrainingJob(XL, cluster("v5p:8"), fsdp=8, tokens=2**21, sequence_length=128, accumulation_steps=4)
    ),
    "replicas": plan(TrainingJob(XL, cluster("v5p:128"), fsdp=16, tp=2, stage=2, tokens=2**20, sequence_length=128)),
    "overlapped": plan(TrainingJob(XXL, cluster("v5p:64"), fsdp=8, tp=8, assumptions=Assumptions("both", True, True))),
}


def shown(name):
    file = io.StringIO()
    show(PLANS[name], "model", file)
    return file.getvalue()


def test_the_book_as_a_reader_sees_it():
    text = shown("book")
    assert text.startswith("model on v5p:64: FSDP 16 x TP 4, 25,302 tokens a step\nAssumed: the forward alone; ")
    found = {" ".join(line.split()) for line in text.splitlines()}
    assert found >= {
        "fits yes, 26.02 GB to spare: 68.98 GB of 95.00 GB a device",
        "activations 11.83 GB",
        "accumulation steps 1",
        "least devices 44",
        "compute-bound yes: from 25,302 tokens on",
        "compute 377.9 ms a micro-batch",
        "best split FSDP 8 x TP 8: from 16,594 tokens on",
        "zero3 309.16 GB",
    }
    assert "Note" not in text


@pytest.mark.parametrize("name", PLANS)
def test_json_is_the_same_numbers_to_the_byte(name):
    found, a_plan = as_json(PLANS[name], "model"), PLANS[name]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    parts = dict(found["bytes_per_device"])
    total, available = parts.pop("total"), parts.pop("available")
    assert abs(sum(parts.values()) - total) <= len(parts)  # each is rounded up
    assert found["fits"] == (total < available) and total == pytest.approx(a_plan.total_bytes, abs=1)
    assert (found["best_bucket_mb"] is None) == (found["buckets"] is None) == (a_plan.job.num_data_ranks == 1)
    if found["min_tokens"] is not None:
        assert found["min_tokens"] == math.ceil(a_plan.min_tokens)
    assert found["compute_bound"] == a_plan.compute_bound
    assert found["tokens"] == found["micro_batch"] * a_plan.num_microbatches * a_plan.job.least_tokens


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too large", "no, 390.36 GB too much: 470.36 GB of 80.00 GB a device"),
        ("too large", "accumulation steps none fit"),
        ("too large", "Note: JAX takes 60.00 GB of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more, which this"),
        ("too large", "products in bfloat16 at 9.894e+14 FLOP/s"),
        ("no batch", "compute-bound no: no batch is large enough"),
        ("no batch", "Note: groups of 2 and 32 are not products of whole axes of 4x4x4: "),
        ("alone", "compute-bound yes: at any batch"),
        ("alone", "best bucket none: no gradients are reduced"),
        ("small torus", "Note: axes of fewer than 4 chips have no wrap-around links: "),
        ("small torus", "Note: every micro-batch gathers, so each has to be as large as a compute-bound batch."),
        ("replicas", "ZeRO stage 2 over 16 ranks x TP 2 x 4 replicas"),
        ("replicas", "Note: gradients are reduced in the backward, which is not counted."),
        ("overlapped", "forward and backward; collectives of different axes at the same time; r(n) = (n-1)/n"),
    ],
)
def test_what_a_reader_must_know_is_said(name, said):
    assert said in " ".join(shown(name).split())


VERIFICATION = Verification(
    PLANS["book"],
    (
        Row("parameters", 1e9, 1e9, "ok", holds=True),
        Row("optimizer state", 2e9, 2e9 + 4, "NOT AS PLANNED", holds=False),
        Row("peak", 5.25, None, "not compiled"),
    ),
    Counter({("all-gather", 8, 16): 4, ("all-gather", 4, 16): 2}),
    TargetMemoryError("the program needs too much", "details", needed_bytes=20, available_bytes=10),
    ("a note",),
)


def test_a_verification_as_a_reader_sees_it():
    file = io.StringIO()
    show_verification(VERIFICATION, file)
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert ["planned", "compiled", "difference", "check"] in rows
    assert "parameters 1,000,000,000 1,000,000,000 0 ok".split() in rows
    assert "optimizer state 2,000,000,000 2,000,000,004 +4 NOT AS PLANNED".split() in rows
    assert "peak 5 - - not compiled".split() in rows
    assert file.getvalue().endswith("Refused by the compiler: the program needs too much.\nNote: a note.\n")


def test_a_verification_as_json():
    found = verification_object(VERIFICATION)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["tokens"], found["as_planned"], found["notes"]) == (25_302, False, ["a note"])
    assert found["refused"] == {"needed_bytes": 20, "available_bytes": 10}
    assert found["collectives"] == [
        {"kind": "all-gather", "bytes": 4, "ranks": 16, "count": 2},
        {"kind": "all-gather", "bytes": 8, "ranks": 16, "count": 4},
    ]
    peak = {"planned": 5, "compiled": None, "difference": None, "check": "not compiled", "as_planned": None}
    assert found["rows"][2] == {"label": "peak", **peak}
