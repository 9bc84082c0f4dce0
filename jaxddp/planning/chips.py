"""Published peak numbers of accelerators, by name, and target specs.

Numbers are dense (without structured sparsity), one direction of a link, and a GB is 10^9 bytes. B200 is the SXM module
at 1000 W. For TPU v5p the vendor gives 4800 Gb/s per chip, all six links of the torus together.

A target is a chip and a count, by hosts:

    spec           means
    ``h100:8``     one host of 8 GPUs joined by NVLink
    ``h100:4x8``   4 hosts of 8 GPUs, the same as ``h100:32``
    ``v5p:128``    one slice of 128 TPU chips, a three-dimensional torus
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chip:
    """One kind of device.

    Attributes:
        name: As in a spec.
        device_kinds: The whole names that drivers and JAX give to it; an H100 PCIe is another chip.
        description: Product name.
        platform: ``"gpu"`` or ``"tpu"``, as in JAX.
        flops_per_s: Peak by dtype, as far as published: ``"float32"`` of the vector units, others of the matrix units.
        matmul_float32: Key of ``flops_per_s`` for a float32 matrix product at default precision.
        link_gb_per_s: What a device can send within its host (NVLink) or slice (all links of the torus), GB/s.
        host_link_gb_per_s: What a device can send to other hosts, GB/s: over its NIC, or the links of the torus.
        devices_per_host: Devices of a full host.
        source: URL of the numbers.
    """

    name: str
    device_kinds: tuple[str, ...]
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

    @property
    def pool_bytes(self) -> float:
        """What JAX takes of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set: three quarters on GPUs."""
        return self.memory_bytes * (0.75 if self.platform == "gpu" else 1.0)


_H100 = Chip(
    name="h100",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    description="NVIDIA H100 SXM 80 GB",
    platform="gpu",
    flops_per_s={
        "float32": 66.9e12,
        "tf32": 494.7e12,
        "bfloat16": 989.4e12,
        "float16": 989.4e12,
        "float8": 1978.9e12,
        "int8": 1978.9e12,
        "float64": 66.9e12,
    },
    matmul_float32="tf32",
    memory_bytes_per_s=3.35e12,
    memory_bytes=80_000_000_000,
    link_gb_per_s=450.0,
    host_link_gb_per_s=50.0,
    devices_per_host=8,
    source="https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper",
)

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _H100,
        replace(
            _H100,
            name="h200",
            device_kinds=("NVIDIA H200",),
            description="NVIDIA H200 SXM 141 GB",
            memory_bytes_per_s=4.8e12,
            memory_bytes=141_000_000_000,
            source="https://www.nvidia.com/en-us/data-center/h200/",
        ),
        Chip(
            name="a100",
            device_kinds=("NVIDIA A100-SXM4-80GB",),
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
            device_kinds=("NVIDIA B200",),
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
            device_kinds=("TPU v5", "TPU v5p"),
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


def chip_of(device_kind: str) -> Chip:
    """Gives the chip that a driver or JAX calls so.

    Raises:
        ValueError: If its numbers are not known.

    Example:
        >>> chip_of("NVIDIA H100 80GB HBM3").name
        'h100'
    """
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip
    known = ", ".join(kind for chip in CHIPS.values() for kind in chip.device_kinds)
    raise ValueError(f"device kind (={device_kind!r}) must be one whose numbers are known: {known}")


# Chips of a slice -> its shape. Other counts make no torus of whole 2x2 hosts.
_V5P_TOPOLOGIES = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
}


@dataclass(frozen=True)
class Target:
    """Devices that programs are compiled for."""

    chip: Chip
    num_hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    @property
    def platform(self) -> str:
        """``"gpu"`` or ``"tpu"``."""
        return self.chip.platform

    @property
    def spec(self) -> str:
        """The canonical spec."""
        if self.platform == "tpu":
            return f"{self.chip.name}:{self.num_devices}"
        hosts = "" if self.num_hosts == 1 else f"{self.num_hosts}x"
        return f"{self.chip.name}:{hosts}{self.devices_per_host}"

    @property
    def topology(self) -> str:
        """The shape as the compiler names it: ``slices x hosts x devices`` on GPUs, the torus on TPUs."""
        if self.platform == "tpu":
            return _V5P_TOPOLOGIES[self.num_devices]
        return f"1x{self.num_hosts}x{self.devices_per_host}"


def target(spec: str) -> Target:
    """Parses a target spec: ``"chip:devices"``, as ``"v5p:8"``, or on GPUs also ``"chip:hosts x devices"``.

    Raises:
        ValueError: If the chip is unknown, or machines do not come in that size.

    Example:
        >>> target("h100:32").spec, target("h100:32").num_hosts
        ('h100:4x8', 4)
    """
    found = re.fullmatch(r"(\w+):(?:(\d+)x)?(\d+)", spec) if isinstance(spec, str) else None
    if found is None:
        raise ValueError(f"target {spec!r} must be chip:devices or chip:hosts x devices, as in 'h100:8' or 'h100:4x8'")
    name, hosts, devices = found.group(1), found.group(2), int(found.group(3))
    if name not in CHIPS:
        raise ValueError(f"target {spec!r} is of an unknown chip {name!r}: one of {', '.join(CHIPS)}")
    chip = CHIPS[name]
    whole = chip.devices_per_host
    if chip.platform == "tpu":
        if hosts is not None:
            raise ValueError(f"target {spec!r} must give the chips of the slice alone, such as '{name}:8'")
        if devices not in _V5P_TOPOLOGIES:
            *others, last = map(str, _V5P_TOPOLOGIES)
            raise ValueError(f"target {spec!r} makes no torus: {name} comes in {', '.join(others)} or {last} chips")
        return Target(chip, devices // whole, whole)
    if hosts is not None:
        if not (1 <= devices <= whole and int(hosts) >= 1):
            raise ValueError(f"target {spec!r} must have at least 1 host of 1 to {whole} devices")
        return Target(chip, int(hosts), devices)
    if 1 <= devices <= whole:
        return Target(chip, 1, devices)
    if devices == 0 or devices % whole:
        raise ValueError(f"target {spec!r} must have 1 to {whole} devices, a multiple of {whole}, or hosts x devices")
    return Target(chip, devices // whole, whole)
