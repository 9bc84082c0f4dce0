"""Names of targets, their meshes and their published numbers."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxddp.instruments.targets import mesh, target_of, topology_arguments
from jaxddp.mesh import data_mesh, platform_of
from jaxddp.planning.chips import CHIPS, chip_of, target


@pytest.mark.parametrize(
    ("spec", "canonical", "num_hosts", "num_devices", "topology"),
    [
        ("h100:1", "h100:1", 1, 1, "1x1x1"),
        ("h100:8", "h100:8", 1, 8, "1x1x8"),
        ("h100:1x8", "h100:8", 1, 8, "1x1x8"),
        ("a100:4x8", "a100:4x8", 4, 32, "1x4x8"),
        ("h200:32", "h200:4x8", 4, 32, "1x4x8"),
        ("b200:3x2", "b200:3x2", 3, 6, "1x3x2"),
        ("h100:512", "h100:64x8", 64, 512, "1x64x8"),
        ("v5p:4", "v5p:4", 1, 4, "2x2x1"),
        ("v5p:512", "v5p:512", 128, 512, "8x8x8"),
    ],
)
def test_every_way_to_name_a_target_gives_its_one_name(spec, canonical, num_hosts, num_devices, topology):
    found = target(spec)
    assert (found.spec, found.num_hosts, found.num_devices, found.topology) == (
        canonical,
        num_hosts,
        num_devices,
        topology,
    )
    assert target(found.spec) == found


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h101:8", "target 'h101:8' is of an unknown chip 'h101': one of h100, h200, a100, b200, v5p"),
        ("v5p:12", "target 'v5p:12' makes no torus: v5p comes in 4, 8, 16, 32, 64, 128, 256 or 512 chips"),
        ("v5p:0", "target 'v5p:0' makes no torus: v5p comes in 4, 8, 16, 32, 64, 128, 256 or 512 chips"),
        ("v5p:2x4", "target 'v5p:2x4' must give the chips of the slice alone, such as 'v5p:8'"),
        ("h100:12", "target 'h100:12' must have 1 to 8 devices, a multiple of 8, or hosts x devices"),
        ("h100:0", "target 'h100:0' must have 1 to 8 devices, a multiple of 8, or hosts x devices"),
        ("h100:0x8", "target 'h100:0x8' must have at least 1 host of 1 to 8 devices"),
        ("h100:2x9", "target 'h100:2x9' must have at least 1 host of 1 to 8 devices"),
        *(
            (spec, f"target {spec!r} must be chip:devices or chip:hosts x devices, as in 'h100:8' or 'h100:4x8'")
            for spec in ("h100", "h100:", "h100:-8", "h100:8x", "h100:8 ", "h100:2x2x2", "", 8, None)
        ),
    ],
)
def test_bad_names(spec, message):
    with pytest.raises(ValueError) as raised:
        target(spec)
    assert str(raised.value) == message


def test_a_mesh_remembers_its_target():
    found = mesh("h100:32", axis="ranks")
    assert dict(found.shape) == {"ranks": 32}
    assert found.axis_types == (AxisType.Auto,)
    assert target_of(found) == target("h100:4x8")
    assert platform_of(found) == "gpu" and platform_of(mesh("v5p:8")) == "tpu"


def test_a_mesh_of_devices_has_no_target_and_one_of_nothing_is_refused():
    assert target_of(data_mesh(2)) is None
    assert platform_of(data_mesh(2)) == jax.devices()[0].platform
    with pytest.raises(ValueError, match=r"has no devices: make it with jaxddp.data_mesh or jaxddp.targets.mesh"):
        target_of(AbstractMesh((8,), ("data",)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"), ("TPU v5", "v5p"),
    ],
)  # fmt: skip
def test_a_device_is_known_by_its_whole_name(kind, name):
    assert chip_of(kind) is CHIPS[name]


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB", "NVIDIA GB200",
        "NVIDIA L40S", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v5 lite", "cpu",
    ],
)  # fmt: skip
def test_a_device_of_another_name_is_not_taken_for_a_known_one(kind):
    with pytest.raises(
        ValueError, match=rf"^device kind \(='{kind}'\) must be one whose numbers are known: NVIDIA H100 "
    ):
        chip_of(kind)


@pytest.mark.parametrize(("spec", "links"), [("h100:8", 18), ("h200:8", 18), ("a100:4", 12), ("b200:2", 18)])
def test_gpus_are_described_with_their_links(spec, links):
    """Without them XLA from jax 0.11 on leaves its own kernels for small all-reduces out."""
    described = topology_arguments(target(spec))["target_config"]
    assert f"device_interconnect_info {{ active_links: {links} }}" in described
