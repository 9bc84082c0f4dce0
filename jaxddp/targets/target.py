"""Accelerators that programs can be compiled for without being there: their names, and meshes of them.

A target is a chip and how many of it, by hosts:

    spec           means
    ``h100:8``     one host of 8 GPUs joined by NVLink
    ``h100:4x8``   4 hosts of 8 GPUs; ``h100:32`` says the same
    ``v5p:128``    one slice of 128 TPU chips, a three-dimensional torus

Its mesh carries the name of the target and no devices: tracing and planning need no more, and ``target_compile.py``
compiles for it. The published numbers of its chip are in ``chips.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from ..mesh import DATA_AXIS
from .chips import CHIPS as CHIPS
from .chips import Chip as Chip

# Chips of a slice -> its shape. Other counts make no torus of whole hosts of 2x2 chips.
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
    """Devices that programs are compiled for.

    Attributes:
        chip: Their kind.
        num_hosts: Number of hosts.
        devices_per_host: Devices of each host.
    """

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
        """The name that ``target`` takes, the same for all ways to say it."""
        if self.platform == "tpu":
            return f"{self.chip.name}:{self.num_devices}"
        hosts = "" if self.num_hosts == 1 else f"{self.num_hosts}x"
        return f"{self.chip.name}:{hosts}{self.devices_per_host}"

    @property
    def topology(self) -> str:
        """The shape as its compiler calls it: ``slices x hosts x devices`` on GPUs, the torus on TPUs."""
        if self.platform == "tpu":
            return _V5P_TOPOLOGIES[self.num_devices]
        return f"1x{self.num_hosts}x{self.devices_per_host}"


def target(spec: str) -> Target:
    """Reads the name of a target.

    Args:
        spec: ``chip:devices`` or, on GPUs, ``chip:hosts x devices``, such as ``"h100:8"``, ``"h100:4x8"``, ``"v5p:8"``.

    Returns:
        The target.

    Raises:
        ValueError: If the chip is unknown, or there are no machines of that many.

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
            raise ValueError(f"target {spec!r} makes no torus: {name} comes in {_listed(_V5P_TOPOLOGIES)} chips")
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


def mesh(spec: str, *, axis: str = DATA_AXIS) -> AbstractMesh:
    """Builds the one-dimensional mesh of a target, to trace, plan and compile for.

    Args:
        spec: As for ``target``.
        axis: Name of the mesh axis.

    Returns:
        A mesh without devices, for ``Trainer`` or ``jax.shard_map``.

    Raises:
        ValueError: As ``target``.

    Example:
        >>> dict(mesh("h100:4x8").shape)
        {'data': 32}
    """
    named = target(spec)
    device = AbstractDevice(device_kind=named.spec, num_cores=None, platform=named.platform)
    return AbstractMesh((named.num_devices,), (axis,), axis_types=(AxisType.Auto,), abstract_device=device)


def target_of(mesh: Mesh | AbstractMesh) -> Target | None:
    """Gives the target that a mesh was made for; None if it is one of real devices.

    Args:
        mesh: Any.

    Raises:
        ValueError: If the mesh has neither devices nor a target.
    """
    if isinstance(mesh, Mesh):
        return None
    if mesh.abstract_device is None:
        raise ValueError(f"mesh (={mesh}) has no devices: make it with jaxddp.data_mesh or jaxddp.targets.mesh")
    return target(mesh.abstract_device.device_kind)


def target_like(mesh: Mesh | AbstractMesh) -> Target:
    """Gives the target that a mesh was made for, or the one that its real devices are.

    Args:
        mesh: Of a target, or of devices whose kind names a chip.

    Returns:
        The target.

    Raises:
        ValueError: If the devices are of no known chip, or too many or few for its topology.
    """
    if (named := target_of(mesh)) is not None:
        return named
    assert isinstance(mesh, Mesh)
    kind = mesh.devices.flat[0].device_kind
    for name in CHIPS:
        if name in kind.lower():
            return target(f"{name}:{mesh.size}")
    raise ValueError(f"device kind (={kind!r}) must be one of a known chip: {', '.join(CHIPS)}")


def _listed(counts: Mapping[int, str]) -> str:
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}"
