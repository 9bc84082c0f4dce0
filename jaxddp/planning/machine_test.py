import math

import pytest

from jaxddp.network import Network
from jaxddp.planning.chips import target
from jaxddp.planning.machine import Axes, cluster_of, network_in_words, network_of


@pytest.mark.parametrize(
    ("chips", "fsdp", "tp", "axes"),
    [
        (64, 16, 4, (2, 1, 1, True)),  # 4 x 4, 4
        (64, 4, 16, (1, 2, 1, True)),
        (64, 64, 1, (3, 1, 1, True)),
        (64, 1, 4, (1, 1, 2, True)),  # replicas over the rest
        (64, 4, 4, (1, 1, 1, True)),
        (128, 32, 4, (2, 1, 1, True)),  # 4 x 8, 4
        (128, 8, 16, (1, 2, 1, True)),
        (64, 8, 8, (2, 1, 1, False)),
        (64, 32, 1, (3, 1, 1, False)),
        (4, 4, 1, (2, 1, 1, True)),  # 2 x 2
    ],
)
def test_groups_have_whole_axes_where_they_can(chips, fsdp, tp, axes):
    cluster = cluster_of(target(f"v5p:{chips}"), "bfloat16")
    found = cluster.axes(fsdp, tp)
    assert found == Axes(*axes)
    assert cluster.rates(fsdp, tp).fsdp_bytes_per_s == found.fsdp * 180e9
    if found.is_exact:
        sides = math.prod(cluster.torus)
        assert sides == chips and found.fsdp + found.tp + found.dp <= len(cluster.torus) + (fsdp == 1) + (tp == 1) + (
            chips == fsdp * tp
        )


def test_a_group_of_gpus_sends_as_the_network_has_it():
    cluster = cluster_of(target("h100:4x8"), "bfloat16")
    network = Network(450, host_gb_per_s=50, devices_per_host=8)
    rates = cluster.rates(fsdp=8, tp=4)  # neighbours cut matrices; 2 of each FSDP group are on one host
    for rate, group in (
        (rates.tp_bytes_per_s, range(4)),
        (rates.fsdp_bytes_per_s, range(0, 32, 4)),
    ):
        share = (len(group) - 1) / len(group)
        assert share * 1e9 / rate == pytest.approx(network.transfer_s("all-gather", 1e9, group), rel=1e-12)  # rounding
    assert rates.tp_bytes_per_s == pytest.approx(450e9) and 50e9 < rates.fsdp_bytes_per_s < 450e9
    assert cluster.rates(1, 8).fsdp_bytes_per_s == 450e9  # a group of one sends nothing
    replicas = cluster.rates(8, 1)
    assert replicas.dp_bytes_per_s == pytest.approx(50e9)


@pytest.mark.parametrize(
    ("spec", "dtype", "flops_per_s"),
    [
        ("h100:8", "bfloat16", 989.4e12), ("h100:8", "float32", 494.7e12), ("h100:8", "float8", 1978.9e12),
        ("v5p:8", "bfloat16", 4.6e14), ("v5p:8", "float32", 4.6e14),
    ],
)  # fmt: skip
def test_peaks_are_those_of_the_dtype(spec, dtype, flops_per_s):
    assert cluster_of(target(spec), dtype).flops_per_s == flops_per_s


@pytest.mark.parametrize(
    ("spec", "dtype", "by_hand", "said"),
    [
        ("v5p:8", "float16", {}, "dtype (='float16') has no published peak on v5p: give --flops-per-s"),
        ("v5p:8", "bfloat16", {"host_link_gb_per_s": 3.0},
         "host_link_gb_per_s (=3.0) must be left out for 'v5p:8', which is one torus"),
        ("h100:8", "bfloat16", {"memory_bytes": -1.0}, "memory_bytes (=-1.0) must be a positive finite number"),
        ("h100:8", "bfloat16", {"latency_us": -1.0},
         "latency_us (=-1.0) must be a finite number of microseconds, 0 or more"),
    ],
)  # fmt: skip
def test_bad_input(spec, dtype, by_hand, said):
    with pytest.raises(ValueError) as raised:
        cluster_of(target(spec), dtype, **by_hand)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("spec", "gb_per_s", "words"),
    [
        ("h100:8", None, "450 GB/s a GPU, NVLink's published peak (rings reach about 360 of an H100's 450): "
         "try --network-gb-per-s 360"),
        ("h100:8", 360, "360 GB/s a GPU as given"),
        ("a100:8", 25, "25 GB/s a GPU as given, what a GPU sends to other hosts: that is one GPU a host, a100:8x1"),
        ("h100:8x1", None, "between hosts 50 GB/s a GPU, a published NIC for each"),
        ("h100:4x8", 12, "within a host 450 GB/s a GPU, NVLink's published peak (rings reach about 360 of an H100's "
         "450), between hosts 12 GB/s a GPU, as given"),
        ("v5p:8", None, "600 GB/s a chip, all its links as published"),
    ],
)  # fmt: skip
def test_the_network_is_named_with_where_it_comes_from(spec, gb_per_s, words):
    assert network_in_words(target(spec), network_of(target(spec), gb_per_s, 20)) == f"network, assumed: {words}"
