import json

import pytest

from jaxddp.cli.plan_console import as_json, show
from jaxddp.planning.chips import target
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.plan import TrainingJob, plan
from jaxddp.planning.workload import feed_forward, transformer

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
}


def test_the_book_as_a_reader_sees_it(capsys):
    show(PLANS["book"], "model")
    text = capsys.readouterr().out
    assert text.startswith("model on v5p:64\n\n")
    found = {" ".join(line.split()) for line in text.splitlines()}
    assert found >= {
        "fits yes", "total 70.29 GB", "available 95.00 GB", "activations 11.83 GB", "accumulation steps 1",
        "min devices 48", "compute bound yes", "min tokens 25,302", "compute 377.9 ms", "tokens 16,594",
        "zero3 309.16 GB", "flops per s 460,000,000,000,000", "passes forward",
    }  # fmt: skip
    assert "Note" not in text


@pytest.mark.parametrize("name", PLANS)
def test_json_is_the_same_numbers_to_the_byte(name):
    found, a_plan = as_json(PLANS[name], "model"), PLANS[name]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    parts = dict(found["bytes_per_device"])
    total, available = parts.pop("total"), parts.pop("available")
    assert abs(sum(parts.values()) - total) <= len(parts)  # each is rounded up
    assert found["fits"] == (total < available)
    assert (found["best_bucket_mb"] is None) == (a_plan.buckets is None) == (a_plan.job.num_data_ranks == 1)
    assert found["tokens"] == found["micro_batch"] * a_plan.num_microbatches * a_plan.job.least_tokens


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too large", "fits no"),
        ("too large", "accumulation steps none"),
        ("too large", "Note: JAX takes 60.00 GB of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."),
        ("no batch", "min tokens none"),
        ("no batch", "Note: groups of 2 and 32 are not products of whole axes of 4x4x4: "),
        ("alone", "buckets none"),
        ("small torus", "Note: axes of fewer than 4 chips have no wrap-around links: "),
        ("small torus", "Note: every micro-batch gathers, so each has to be as large as a compute-bound batch."),
        ("replicas", "Note: gradients are reduced in the backward, which is not counted."),
    ],
)
def test_what_a_reader_must_know_is_said(name, said, capsys):
    show(PLANS[name], "model")
    assert said in " ".join(capsys.readouterr().out.split())
