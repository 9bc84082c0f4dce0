"""Published peak numbers of accelerators, by name, and target specs.

Numbers are dense (without structured sparsity), one direction of a link, and a GB is 10^9 bytes. B200 is the SXM module
at 1000 W. For TPUs the vendor gives Gb/s per chip, all links of the torus together: 4800 for v5p.

A target is a chip and a count, by hosts:

    spec           means
    ``h100:8``     one host of 8 GPUs joined by NVLink
    ``h100:4x8``   4 hosts of 8 GPUs, the same as ``h100:32``
    ``v5p:128``    one slice of 128 TPU chips, a three-dimensional torus
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


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
        is_measured: Whether ``products.py`` has measured rates for it that count in place of its peaks.
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
    is_measured: bool = False

    @property
    def pool_bytes(self) -> float:
        """What JAX takes of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set: three quarters on GPUs."""
        return self.memory_bytes * (0.75 if self.platform == "gpu" else 1.0)


def _gpu(
    name: str,
    kind: str,
    description: str,
    tera: Mapping[str, float],
    tb_per_s: float,
    gb: int,
    links: tuple[int, int],
    source: str,
    devices_per_host: int = 8,
) -> Chip:
    return Chip(
        name, (kind,), description, "gpu", {dtype: float(round(1e12 * value)) for dtype, value in tera.items()}, "tf32",
        round(tb_per_s * 1e12), gb * 10**9, *links, devices_per_host=devices_per_host, source=source,
    )  # fmt: skip


def _tensor_cores(tf32: float, bfloat16: float, int8: float, float32: float, float64: float) -> dict[str, float]:
    """Peaks in TFLOP/s."""
    return {
        "float32": float32, "tf32": tf32, "bfloat16": bfloat16, "float16": bfloat16, "float8": int8, "int8": int8,
        "float64": float64,
    }  # fmt: skip


_HOPPER = _tensor_cores(494.7, 989.4, 1978.9, 66.9, 66.9)
_AMPERE = _tensor_cores(156, 312, 624, 19.5, 19.5)
del _AMPERE["float8"]
_BLACKWELL_ULTRA = _tensor_cores(1250, 2500, 5000, 80, 1.3)
del _BLACKWELL_ULTRA["int8"]
_NVIDIA = "https://www.nvidia.com"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu(
            "h100", "NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM 80 GB", _HOPPER, 3.35, 80, (450, 50),
            "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper",
        ),
        _gpu(
            "h200", "NVIDIA H200", "NVIDIA H200 SXM 141 GB", _HOPPER, 4.8, 141, (450, 50),
            f"{_NVIDIA}/en-us/data-center/h200/",
        ),
        _gpu(
            "a100", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM 80 GB", _AMPERE, 2.039, 80, (300, 25),
            f"{_NVIDIA}/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        ),
        _gpu(
            "b200", "NVIDIA B200", "NVIDIA B200 SXM 180 GB", _tensor_cores(1100, 2250, 4500, 80, 40), 8, 180, (900, 50),
            "https://resources.nvidia.com/en-us-blackwell-architecture",
        ),
        _gpu(
            "gb200", "NVIDIA GB200", "NVIDIA GB200, 72 of which share NVLink", _tensor_cores(1250, 2500, 5000, 80, 40),
            8, 186, (900, 50), f"{_NVIDIA}/en-us/data-center/gb200-nvl72/", devices_per_host=72,
        ),
        _gpu(
            "gb300", "NVIDIA GB300", "NVIDIA GB300, 72 of which share NVLink", _BLACKWELL_ULTRA,
            8, 279, (900, 100), f"{_NVIDIA}/en-us/data-center/gb300-nvl72/", devices_per_host=72,
        ),
        Chip(
            "v5p", ("TPU v5", "TPU v5p"), "Google Cloud TPU v5p", "tpu", {"bfloat16": 459e12}, "bfloat16", 2.765e12,
            95_000_000_000, 600, 600, devices_per_host=4, source="https://cloud.google.com/tpu/docs/v5p",
        ),
        Chip(
            "v6e", ("TPU v6 lite", "TPU v6e"), "Google Cloud TPU v6e", "tpu", {"bfloat16": 918e12, "int8": 1836e12},
            "bfloat16", 1.64e12, 32_000_000_000, 448, 448, devices_per_host=4,
            source="https://cloud.google.com/tpu/docs/v6e",
        ),
        Chip(
            "v7x", ("TPU7x",), "Google Cloud TPU v7x", "tpu", {"bfloat16": 2307e12, "float8": 4614e12}, "bfloat16",
            7.38e12, 192_000_000_000, 1200, 1200, devices_per_host=4, source="https://cloud.google.com/tpu/docs/tpu7x",
        ),
    )
}  # fmt: skip


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
_IN_3D = dict(zip(
    (4, 8, 16, 32, 64, 128, 256, 512), "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8".split(), strict=True
))  # fmt: skip
_IN_2D = dict(zip((4, 8, 16, 32, 64, 128, 256), "2x2 2x4 4x4 4x8 8x8 8x16 16x16".split(), strict=True))
_TOPOLOGIES = {"v5p": _IN_3D, "v6e": _IN_2D, "v7x": _IN_3D}


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
            return _TOPOLOGIES[self.chip.name][self.num_devices]
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
        if devices not in _TOPOLOGIES[name]:
            *others, last = map(str, _TOPOLOGIES[name])
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
