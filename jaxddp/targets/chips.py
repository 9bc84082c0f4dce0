"""Published numbers of accelerators, by name: the vendors' peaks.

They are dense (without structured sparsity), one direction of a link, and a GB is 10^9 bytes. B200 is the SXM module
at 1000 W. Of TPU v5p the vendor gives 4800 Gb/s a chip, which is all six links of the torus together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_HOPPER_FLOPS_PER_S = {
    "float32": 66.9e12,
    "tf32": 494.7e12,
    "bfloat16": 989.4e12,
    "float16": 989.4e12,
    "float8": 1978.9e12,
    "int8": 1978.9e12,
    "float64": 66.9e12,
}


@dataclass(frozen=True)
class Chip:
    """One kind of device.

    Attributes:
        name: As in a spec.
        description: The product.
        platform: ``"gpu"`` or ``"tpu"``, as JAX calls it.
        flops_per_s: Peak by dtype: ``"float32"`` of the vector units, all others of the matrix units. What is not
            published is not there.
        matmul_float32: The key of ``flops_per_s`` that a float32 matrix product at default precision runs at.
        memory_bytes_per_s: Bandwidth of the device's memory.
        memory_bytes: Size of the device's memory.
        link_gb_per_s: What a device can send to others of its host (NVLink) or slice (all links of the torus), GB/s.
        host_link_gb_per_s: What a device can send to other hosts, GB/s: over its own NIC, or the links of the torus.
        devices_per_host: Devices of a whole host.
        source: Address of the numbers.
    """

    name: str
    description: str
    platform: str
    flops_per_s: Mapping[str, float]
    matmul_float32: str
    memory_bytes_per_s: float
    memory_bytes: int
    link_gb_per_s: float
    host_link_gb_per_s: float
    devices_per_host: int
    source: str


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="h100",
            description="NVIDIA H100 SXM 80 GB",
            platform="gpu",
            flops_per_s=_HOPPER_FLOPS_PER_S,
            matmul_float32="tf32",
            memory_bytes_per_s=3.35e12,
            memory_bytes=80_000_000_000,
            link_gb_per_s=450.0,
            host_link_gb_per_s=50.0,
            devices_per_host=8,
            source="https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper",
        ),
        Chip(
            name="h200",
            description="NVIDIA H200 SXM 141 GB",
            platform="gpu",
            flops_per_s=_HOPPER_FLOPS_PER_S,
            matmul_float32="tf32",
            memory_bytes_per_s=4.8e12,
            memory_bytes=141_000_000_000,
            link_gb_per_s=450.0,
            host_link_gb_per_s=50.0,
            devices_per_host=8,
            source="https://www.nvidia.com/en-us/data-center/h200/",
        ),
        Chip(
            name="a100",
            description="NVIDIA A100 SXM 80 GB",
            platform="gpu",
            flops_per_s={
                "float32": 19.5e12,
                "tf32": 156e12,
                "bfloat16": 312e12,
                "float16": 312e12,
                "int8": 624e12,
                "float64": 19.5e12,
            },
            matmul_float32="tf32",
            memory_bytes_per_s=2.039e12,
            memory_bytes=80_000_000_000,
            link_gb_per_s=300.0,
            host_link_gb_per_s=25.0,
            devices_per_host=8,
            source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
            "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        ),
        Chip(
            name="b200",
            description="NVIDIA B200 SXM 180 GB",
            platform="gpu",
            flops_per_s={
                "float32": 80e12,
                "tf32": 1100e12,
                "bfloat16": 2250e12,
                "float16": 2250e12,
                "float8": 4500e12,
                "int8": 4500e12,
                "float64": 40e12,
            },
            matmul_float32="tf32",
            memory_bytes_per_s=8e12,
            memory_bytes=180_000_000_000,
            link_gb_per_s=900.0,
            host_link_gb_per_s=50.0,
            devices_per_host=8,
            source="https://resources.nvidia.com/en-us-blackwell-architecture",
        ),
        Chip(
            name="v5p",
            description="Google Cloud TPU v5p",
            platform="tpu",
            flops_per_s={"bfloat16": 459e12},
            matmul_float32="bfloat16",
            memory_bytes_per_s=2.765e12,
            memory_bytes=95_000_000_000,
            link_gb_per_s=600.0,
            host_link_gb_per_s=600.0,
            devices_per_host=4,
            source="https://cloud.google.com/tpu/docs/v5p",
        ),
    )
}
