"""Published peak numbers of accelerators, by name, and target specs: a chip and a count, by hosts.

    ``h100:8``     one host of 8 GPUs joined by NVLink
    ``h100:4x8``   4 hosts of 8 GPUs, the same as ``h100:32``
    ``v5p:128``    one slice of 128 TPU chips, a three-dimensional torus

Numbers are dense, without structured sparsity; those of links are of one direction. A B200 is the SXM module of 1000 W.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Chip:
    """One kind of device."""

    name: str
    device_kinds: tuple[str, ...]  # the whole names that drivers and JAX give to it; an H100 PCIe is another chip
    platform: str  # "gpu" or "tpu", as in JAX
    flops_per_s: Mapping[str, float]  # peaks by dtype: "float32" of the vector units, others of the matrix units
    memory_bytes_per_s: float
    memory_bytes: int
    link_gb_per_s: float  # what a device can send within its host (NVLink) or slice (all links of the torus)
    host_link_gb_per_s: float  # what it can send to other hosts: over its NIC, or the links of the torus
    devices_per_host: int  # of a full host
    is_measured: bool = False  # whether measured rates count in place of its peaks: ``products.as_measured``
    kernel_s: float = 0.0  # between one kernel and the next

    def __post_init__(self) -> None:
        is_gpu = self.platform == "gpu"
        self.matmul_float32 = "tf32" if is_gpu else "bfloat16"  # the dtype of its products at default precision
        # What JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
        self.pool_bytes = self.memory_bytes * (0.75 if is_gpu else 1.0)

    def product_dtype(self, dtype: str) -> str:
        """The dtype in which products of arrays of ``dtype`` are computed, at default precision."""
        return self.matmul_float32 if dtype == "float32" else dtype


def _peaks(tf32: float, bfloat16: float, int8: float, float32: float, float64: float) -> dict[str, float]:
    matrices = {"tf32": tf32, "bfloat16": bfloat16, "float16": bfloat16, "float8": int8, "int8": int8}
    return {"float32": float32, **matrices, "float64": float64}


_HOPPER, _BLACKWELL = _peaks(494.7, 989.4, 1978.9, 66.9, 66.9), _peaks(1250, 2500, 5000, 80, 40)
_AMPERE = {"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312, "int8": 624, "float64": 19.5}
_ULTRA = {"float32": 80, "tf32": 1250, "bfloat16": 2500, "float16": 2500, "float8": 5000, "float64": 1.3}

# Names; peaks in TFLOP/s; memory in TB/s and GB; GB/s within and between hosts; devices of a host.
_GPUS = (
    # https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper
    (("h100", "NVIDIA H100 80GB HBM3"), _HOPPER, (3.35, 80), (450, 50), 8),
    # https://www.nvidia.com/en-us/data-center/h200/
    (("h200", "NVIDIA H200"), _HOPPER, (4.8, 141), (450, 50), 8),
    # nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    (("a100", "NVIDIA A100-SXM4-80GB"), _AMPERE, (2.039, 80), (300, 25), 8),
    # https://resources.nvidia.com/en-us-blackwell-architecture
    (("b200", "NVIDIA B200"), _peaks(1100, 2250, 4500, 80, 40), (8, 180), (900, 50), 8),
    # https://www.nvidia.com/en-us/data-center/gb200-nvl72/: 72 share NVLink
    (("gb200", "NVIDIA GB200"), _BLACKWELL, (8, 186), (900, 50), 72),
    # https://www.nvidia.com/en-us/data-center/gb300-nvl72/
    (("gb300", "NVIDIA GB300"), _ULTRA, (8, 279), (900, 100), 72),
)
_TPUS = (
    # https://cloud.google.com/tpu/docs/v5p, v6e and tpu7x
    (("v5p", "TPU v5", "TPU v5p"), {"bfloat16": 459.0}, (2.765, 95), (600, 600), 4),
    (("v6e", "TPU v6 lite", "TPU v6e"), {"bfloat16": 918.0, "int8": 1836.0}, (1.64, 32), (448, 448), 4),
    (("v7x", "TPU7x"), {"bfloat16": 2307.0, "float8": 4614.0}, (7.38, 192), (1200, 1200), 4),
)
CHIPS: dict[str, Chip] = {
    name: Chip(
        name, tuple(kinds), platform, {dtype: float(round(1e12 * peak)) for dtype, peak in peaks.items()},
        float(round(1e12 * tb_per_s)), gb * 10**9, *links, devices_per_host,
    )
    for platform, rows in (("gpu", _GPUS), ("tpu", _TPUS))
    for (name, *kinds), peaks, (tb_per_s, gb), links, devices_per_host in rows
}  # fmt: skip
# Chips of a slice -> its shape. Other counts make no torus of whole 2x2 hosts.
_IN_3D = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
_IN_2D = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_TOPOLOGIES = {"v5p": _IN_3D, "v6e": _IN_2D, "v7x": _IN_3D}


@dataclass
class Target:
    """Devices that programs are compiled for."""

    chip: Chip
    num_hosts: int
    devices_per_host: int

    def __post_init__(self) -> None:
        name, hosts, devices = self.chip.name, self.num_hosts, self.devices_per_host
        self.platform, self.num_devices = self.chip.platform, hosts * devices
        is_tpu = self.platform == "tpu"
        self.spec = f"{name}:{self.num_devices if is_tpu or hosts == 1 else f'{hosts}x{devices}'}"
        # As the compiler names it: the torus, or slices x hosts x devices.
        self.topology = _TOPOLOGIES[name][self.num_devices] if is_tpu else f"1x{hosts}x{devices}"
        sides = map(int, self.topology.split("x")) if is_tpu else ()
        self.torus = tuple(side for side in sides if side > 1)


def target(spec: str) -> Target:
    """Parses a target spec; a ValueError if the chip is unknown, or machines do not come in that size."""
    found = re.fullmatch(rf"({'|'.join(CHIPS)}):(?:(\d+)x)?(\d+)", str(spec))
    if found is None:
        raise ValueError(f"target {spec!r} must be like 'h100:8', or 'h100:4x8' for 4 hosts; chips: {', '.join(CHIPS)}")
    name, hosts, devices = found.group(1), found.group(2), int(found.group(3))
    chip = CHIPS[name]
    whole = chip.devices_per_host
    if chip.platform == "tpu":
        if hosts is not None or devices not in _TOPOLOGIES[name]:
            sizes = ", ".join(map(str, _TOPOLOGIES[name]))
            raise ValueError(f"target {spec!r} makes no torus: {name} comes in {sizes} chips")
        return Target(chip, devices // whole, whole)
    if hosts is None and (devices < whole or devices % whole == 0):
        hosts, devices = max(1, devices // whole), min(devices, whole)
    if hosts is None or not (1 <= devices <= whole and int(hosts) >= 1):
        raise ValueError(f"target {spec!r} must have 1 to {whole} devices, a multiple of {whole}, or hosts x devices")
    return Target(chip, int(hosts), devices)
