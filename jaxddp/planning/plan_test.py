import math
from dataclasses import replace

import pytest

from jaxddp import targets
from jaxddp.planning.cost.memory import MIXED, activation_bytes
from jaxddp.planning.cost.scaling import Assumptions
from jaxddp.planning.cost.workload import feed_forward, transformer
from jaxddp.planning.job import Job
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.plan import plan

XXL = feed_forward(width=16384, hidden=53248, num_blocks=126)
XL = transformer(vocab=10_000, context=128, width=768, num_layers=16, num_heads=12, hidden=3200)
V5P = cluster_of(targets.target("v5p:64"), "bfloat16")
H100 = cluster_of(targets.target("h100:8"), "bfloat16")
BOOK = Job(XXL, V5P, fsdp=16, tp=4, tokens=25_302)


def test_the_scaling_books_example():
    found = plan(BOOK)
    assert (
        found.min_tokens == pytest.approx(25_301.7, abs=0.05) and found.compute_bound and found.fits
    )  # printed digits
    assert not plan(replace(BOOK, tokens=25_301)).compute_bound
    assert plan(replace(BOOK, tokens=None)).tokens == 25_302
    assert (found.best_split.fsdp, found.best_split.tp, math.ceil(found.best_split.tokens)) == (8, 8, 16_594)
    parts = found.bytes_per_device
    assert sum(parts[name] for name in ("parameters", "gradients", "optimizer_state")) == 16 * XXL.num_params / 64
    assert parts["gathered_parameters"] == 2 * 2 * (2 * 16384 * 53248) / 4
    assert parts["activations"] == pytest.approx(2 * 126 * (16384 + 53248 / 4) * 25_302 / 16, rel=1e-12)  # rounding
    assert found.traffic_bytes["zero3"] == 3 * 2 * XXL.num_params / 4 * 15 / 16
    assert found.traffic_bytes["zero3"] == 1.5 * found.traffic_bytes["bucketed"] == 1.5 * found.traffic_bytes["zero1"]


def test_the_least_number_of_devices_is_the_first_that_fits():
    found = plan(BOOK)
    assert found.min_devices == 44
    for fsdp, fits in ((10, False), (11, True)):  # with as many tokens on each FSDP rank
        cluster = replace(V5P, num_devices=4 * fsdp, torus=(fsdp, 4))
        one = plan(replace(BOOK, cluster=cluster, fsdp=fsdp, tokens=25_302 * fsdp // 16, accumulation_steps=1))
        assert one.fits is fits
    # Nothing is shared at stage 0: what is too large for a device is too large for any number of them.
    assert plan(Job(XXL, V5P, fsdp=16, tp=4, tokens=25_302, stage=0)).min_devices is None


def test_micro_batches_are_the_fewest_that_fit():
    tokens = 2**17 * 128
    job = Job(XL, H100, fsdp=8, tokens=tokens, sequence_length=128)
    found = plan(job)
    steps = found.accumulation_steps
    assert steps > 1 and found.fits and tokens % (steps * 8 * 128) == 0
    assert found.micro_batch == tokens / (steps * 8 * 128)
    fewer = max(count for count in range(1, steps) if tokens % (count * 8 * 128) == 0)
    assert not plan(replace(job, accumulation_steps=fewer)).fits
    assert found.bytes_per_device["activations"] == activation_bytes(
        tokens / 8 / steps, XL.kept_per_token, XL.kept_cut_per_token
    )


def test_where_each_micro_batch_gathers_each_must_be_large_enough():
    once = plan(BOOK)
    for steps, tokens in ((2, 25_302), (2, 2 * 25_302), (4, 4 * 25_302 - 4)):
        found = plan(replace(BOOK, accumulation_steps=steps, tokens=tokens))
        assert found.min_tokens == once.min_tokens
        assert (
            found.compute_bound
            == (tokens >= steps * 25_302)
            == bool(found.times.compute_s >= found.times.communication_s(BOOK.assumptions))
        )
    # Gradients are summed once, of all micro-batches.
    sums = Job(XL, H100, fsdp=8, stage=1, sequence_length=128, assumptions=Assumptions("backward"))
    least = plan(sums).tokens
    twice = plan(replace(sums, tokens=2 * least, accumulation_steps=2))
    assert twice.compute_bound and twice.min_tokens == plan(sums).min_tokens > least / 2


def test_what_never_fits_says_so():
    found = plan(Job(XXL, H100, fsdp=8, tokens=100_000))
    assert (found.fits, found.accumulation_steps, found.min_devices, found.num_microbatches) == (False, None, None, 1)
    # Parameters, gradients and state of every rank, 16 bytes each, are more than its memory without a token.
    assert 16 * XXL.num_params / 8 > H100.memory_bytes
    tight = replace(H100, memory_bytes=3e9)
    assert plan(Job(XL, tight, fsdp=8, tokens=2**20, sequence_length=128)).fits


def test_a_batch_that_is_not_given_is_whole_sequences_on_every_rank():
    found = plan(Job(XL, H100, fsdp=8, sequence_length=128))
    assert found.compute_bound and found.tokens % 1024 == 0 and found.tokens - 1024 < found.min_tokens
    assert plan(Job(XL, H100, fsdp=8, sequence_length=128, accumulation_steps=64)).tokens % (1024 * 64) == 0
    alone = Job(XXL, H100, fsdp=1, tp=8, sequence_length=128)
    assert plan(alone).tokens == 128  # nothing is gathered, no gradient summed
    with pytest.raises(ValueError, match=r"^tokens must be given: with tp \(=32\) no batch is compute-bound$"):
        plan(Job(XXL, V5P, fsdp=2, tp=32))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_share_what_they_say(stage):
    found = plan(Job(XL, H100, fsdp=8, tokens=2**15, sequence_length=128, stage=stage, per_parameter=MIXED))
    share = [8 if stage >= least else 1 for least in (3, 2, 1)]
    state = [found.bytes_per_device[name] for name in ("parameters", "gradients", "optimizer_state")]
    assert state == [each * XL.num_params / by for each, by in zip((2, 2, 12), share, strict=True)]
    assert (found.bytes_per_device["gathered_parameters"] > 0) == (stage == 3)
    assert found.times.dp_s == 0  # forward only
