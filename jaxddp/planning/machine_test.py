import pytest

from jaxddp.network import Network
from jaxddp.planning.chips import target
from jaxddp.planning.machine import link_rates, machine_of


def test_tensor_parallelism_has_one_axis_of_a_torus():
    for spec, tp, axes, gb_per_s in (
        ("v5p:64", 4, 2, 180), ("v5p:64", 1, 3, 180), ("v5p:4", 1, 2, 180), ("v6e:16", 1, 2, 224), ("v7x:64", 2, 2, 400)
    ):  # fmt: skip
        others, link = axes * gb_per_s * 1e9, gb_per_s * 1e9
        assert link_rates(*machine_of(target(spec), "bfloat16"), 4, tp) == (others, link, others)


def test_a_group_of_gpus_sends_as_the_network_has_it():
    machine = machine_of(target("h100:4x8"), "bfloat16")
    network = Network(450, host_gb_per_s=50, devices_per_host=8)
    of_fsdp, of_tp, _ = link_rates(*machine, fsdp=8, tp=4)  # neighbours cut matrices; 2 of an FSDP group share a host
    for rate, group in ((of_tp, range(4)), (of_fsdp, range(0, 32, 4))):
        share = (len(group) - 1) / len(group)
        assert share * 1e9 / rate == pytest.approx(network.transfer_s("all-gather", 1e9, group), rel=1e-12)  # rounding
    assert of_tp == pytest.approx(450e9) and 50e9 < of_fsdp < 450e9
    assert link_rates(*machine, 1, 8)[0] == 450e9  # a group of one sends nothing
    assert link_rates(*machine, 8, 1)[2] == pytest.approx(50e9)


def test_peaks_are_those_of_the_dtype():
    peaks = {("h100:8", "bfloat16"): 989.4e12, ("h100:8", "float32"): 494.7e12, ("v5p:8", "float32"): 4.6e14}
    for (spec, dtype), flops_per_s in peaks.items():
        chip = machine_of(target(spec), dtype)[0].chip
        assert chip.flops_per_s[chip.product_dtype(dtype)] == flops_per_s
