import math
from dataclasses import replace

import pytest

from jaxddp.network import Network
from jaxddp.planning.chips import target
from jaxddp.planning.formulas import MIXED, best_buckets
from jaxddp.planning.machine import machine_of
from jaxddp.planning.plan import TrainingJob, gradient_rate, plan
from jaxddp.planning.workload import feed_forward, transformer

pytestmark = pytest.mark.smoke

XXL = feed_forward(width=16384, hidden=53248, num_blocks=126)
XL = transformer(vocab=10_000, context=128, width=768, num_layers=16, num_heads=12, hidden=3200)
V5P = machine_of(target("v5p:64"), "bfloat16")
H100 = machine_of(target("h100:8"), "bfloat16")
MODEL = feed_forward(64, 256)
BOOK = TrainingJob(XXL, *V5P, fsdp=16, tp=4, tokens=25_302)


def test_the_scaling_books_example():
    found = plan(BOOK)
    assert found["min_tokens"] == 25_302 and found["compute_bound"] and found["fits"]
    assert not plan(replace(BOOK, tokens=25_301))["compute_bound"]
    assert plan(replace(BOOK, tokens=None))["tokens"] == 25_302
    assert found["best_split"] == {"fsdp": 8, "tp": 8, "tokens": 16_594}
    parts = found["bytes_per_device"]
    assert sum(parts[name] for name in ("parameters", "gradients", "optimizer_state")) == 16 * XXL.num_params / 64
    assert parts["gathered_parameters"] == 3 * 2 * (2 * 16384 * 53248) / 4
    assert parts["gradient_buckets"] == 2 * (2 * 16384 * 53248) / 4  # of one unit
    assert parts["activations"] == math.ceil(2 * 126 * (16384 + 53248 / 4) * 25_302 / 16)
    sent = found["traffic_bytes_per_step"]
    assert sent["zero3"] == 3 * 2 * XXL.num_params / 4 * 15 / 16
    # zero1 gathers the updated parameters in float32, of which it has them.
    assert sent["zero3"] == 1.5 * sent["bucketed"] == sent["zero1"]


def test_the_least_number_of_devices_is_the_first_that_fits():
    assert plan(BOOK)["min_devices"] == 48

    def planned(hosts):  # with as many tokens on each FSDP rank
        one = machine_of(target(f"h100:{hosts}x4"), "bfloat16")
        return plan(TrainingJob(XXL, *one, fsdp=hosts, tp=4, tokens=1024 * hosts, sequence_length=1024))

    least = planned(16)["min_devices"]
    assert [planned(hosts)["fits"] for hosts in (least // 4 - 1, least // 4)] == [False, True]
    # Nothing is shared at stage 0: what is too large for a device is too large for any number of them.
    assert plan(TrainingJob(XXL, *V5P, fsdp=16, tp=4, tokens=25_302, stage=0))["min_devices"] is None


def test_micro_batches_are_the_fewest_that_fit():
    tokens = 2**17 * 128
    job = TrainingJob(XL, *H100, fsdp=8, tokens=tokens, sequence_length=128)
    found = plan(job)
    steps, held = found["accumulation_steps"], found["bytes_per_device"]
    assert steps > 1 and found["fits"] and tokens % (steps * 8 * 128) == 0
    assert found["micro_batch"] == tokens / (steps * 8 * 128)
    kept = 2 * (XL.kept_per_token + XL.kept_cut_per_token)
    assert held["activations"] == tokens / 8 / steps * kept
    fewer = max(count for count in range(1, steps) if tokens % (count * 8 * 128) == 0)
    assert held["total"] + held["activations"] * (steps / fewer - 1) >= held["available"]


def test_a_batch_that_is_not_given_is_whole_sequences_on_every_rank():
    found = plan(TrainingJob(XL, *H100, fsdp=8, sequence_length=128))
    assert found["compute_bound"] and found["tokens"] % 1024 == 0 and found["tokens"] - 1024 < found["min_tokens"]
    alone = TrainingJob(XXL, *H100, fsdp=1, tp=8, sequence_length=128)
    assert plan(alone)["tokens"] == 128  # nothing is gathered, no gradient summed
    with pytest.raises(ValueError, match=r"^tokens must be given: with tp \(=32\) no batch is compute-bound$"):
        plan(TrainingJob(XXL, *V5P, fsdp=2, tp=32))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_share_what_they_say(stage):
    found = plan(TrainingJob(XL, *H100, fsdp=8, tokens=2**15, sequence_length=128, stage=stage, per_parameter=MIXED))
    share = [8 if stage >= least else 1 for least in (3, 2, 1)]
    each_held = (4, 2, 8) if stage == 3 else (2, 2, 12)  # stage 3 shards masters, and holds no copies
    state = [found["bytes_per_device"][name] for name in ("parameters", "gradients", "optimizer_state")]
    assert state == [each * XL.num_params / by for each, by in zip(each_held, share, strict=True)]
    assert (found["bytes_per_device"]["gathered_parameters"] > 0) == (stage == 3)
    assert (found["microbatch_times_s"]["dp"] == 0) == (stage == 3)


def job(spec="h100:8", model=XL, **options):
    machine = machine_of(target(spec), "bfloat16", gb_per_s=options.pop("gb_per_s", None))
    return TrainingJob(model, *machine, **{"fsdp": machine[0].num_devices, **options})


@pytest.mark.parametrize(("stage", "kind"), [(0, "all-reduce"), (1, "reduce-scatter"), (3, "reduce-scatter")])
def test_a_bucket_costs_what_its_collective_does(stage, kind):
    rate, latency_s = gradient_rate(job(stage=stage))
    network = Network(450)
    for num_bytes in (1e3, 1e9):
        ours = num_bytes / rate + latency_s
        assert ours == pytest.approx(network.seconds(kind, num_bytes, range(8)), rel=1e-12)  # rounding


def test_the_best_buckets_are_those_of_the_backward_and_its_collectives():
    for gb_per_s in (1.0, 450.0):
        one = job(stage=0, gb_per_s=gb_per_s, tokens=32_768)
        backward_s = 2 * XL.flops_per_token * 32_768 / 8 / 989.4e12
        assert plan(one)["buckets"] == best_buckets(backward_s, 2 * XL.num_params, *gradient_rate(one))
    assert plan(BOOK)["buckets"]["num_buckets"] == len(XXL.tensors)  # more and smaller ones would be better
    # By default up to an eighth of all gradients; the embedding of a small model is a bucket of its own.
    assert plan(one)["bytes_per_device"]["gradient_buckets"] == 2 * XL.num_params / 8
    small = transformer(vocab=50_000, context=128, width=768, num_layers=1, num_heads=12, hidden=3200)
    assert plan(job(model=small, stage=0, tokens=1024))["bytes_per_device"]["gradient_buckets"] == 2 * 50_000 * 768


def test_what_does_not_gather_sums_gradients():
    for options, ranks, data_ranks in (
        ({"fsdp": 16, "tp": 4}, (16, 4, 1), 16),
        ({"fsdp": 4, "tp": 4}, (4, 4, 4), 16),
        ({"fsdp": 16, "tp": 4, "stage": 1}, (1, 4, 16), 16),
        ({"fsdp": 1, "tp": 4}, (1, 4, 16), 16),
        ({"fsdp": 1, "tp": 64}, (1, 64, 1), 1),
    ):
        job = TrainingJob(MODEL, *V5P, **options)
        assert (job.ranks, job.num_data_ranks, job.gathers) == (ranks, data_ranks, ranks[0] > 1)
