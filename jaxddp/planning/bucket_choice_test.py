import math

import pytest

from jaxddp import targets
from jaxddp.planning.bucket_choice import best_buckets, gradient_rate
from jaxddp.planning.buckets import MIB
from jaxddp.planning.cost.scaling import Assumptions
from jaxddp.planning.cost.workload import feed_forward, transformer
from jaxddp.planning.job import Job
from jaxddp.planning.machine import cluster_of
from jaxddp.planning.network import Network

XL = transformer(vocab=10_000, context=128, width=768, num_layers=16, num_heads=12, hidden=3200)
EXACT = Assumptions(ring_factors=True)


def job(spec="h100:8", model=XL, **options):
    by_hand = {name: options.pop(name) for name in ("link_gb_per_s", "latency_us") if name in options}
    cluster = cluster_of(targets.target(spec), "bfloat16", **by_hand)
    return Job(model, cluster, **{"fsdp": cluster.num_devices, "assumptions": EXACT, **options})


@pytest.mark.parametrize(("stage", "kind"), [(0, "all-reduce"), (1, "reduce-scatter"), (3, "reduce-scatter")])
def test_a_bucket_costs_what_its_collective_does(stage, kind):
    rate, latency_s = gradient_rate(job(stage=stage))
    network = Network(450)
    for num_bytes in (1e3, 1e9):
        ours = num_bytes / rate + latency_s
        assert ours == pytest.approx(network.seconds(kind, num_bytes, range(8)), rel=1e-12)  # rounding


def test_replicas_sum_what_is_left_of_a_bucket():
    rate, latency_s = gradient_rate(job("h100:4x8", fsdp=8))
    within, between = Network(450), Network(50)
    expected = within.seconds("reduce-scatter", 1e9, range(8)) + between.seconds("all-reduce", 1e9 / 8, range(4))
    assert 1e9 / rate + latency_s == pytest.approx(expected, rel=1e-12)  # rounding


def test_the_best_cap_exposes_least():
    """Of caps that leave as many buckets as the optimum of equal ones has, within what whole tensors allow."""
    for gb_per_s in (1.0, 12.0, 450.0):
        found = best_buckets(job(stage=0, link_gb_per_s=gb_per_s, latency_us=90.0), tokens=32_768, num_microbatches=1)
        assert (
            found.tail_s >= found.equal.tail_s * 0.5
        )  # equal buckets of any size are the ideal, whole tensors are not
        assert found.tail_s <= 3 * found.equal.tail_s
        everything = best_buckets(
            job(stage=0, link_gb_per_s=gb_per_s, latency_us=1e6), tokens=32_768, num_microbatches=1
        )
        assert everything.num_buckets == 1 and everything.largest_bytes == 2 * XL.num_params


def test_a_cap_is_never_smaller_than_the_smallest_tensor():
    blocks = feed_forward(16384, 53248, 126)
    found = best_buckets(job("v5p:64", blocks, fsdp=16, tp=4), tokens=25_302, num_microbatches=1)
    assert found.cap_mb == 416 == 16384 * 53248 * 2 / 4 / MIB and found.num_buckets == 252


def test_no_latency_no_finite_optimum_no_ranks_no_buckets():
    assert best_buckets(job(latency_us=0.0), 32_768, 1).equal is None
    alone = job("h100:8", fsdp=1, tp=8)
    assert best_buckets(alone, 32_768, 1) is None
    assert gradient_rate(alone) == (math.inf, 0)
