"""Meshes of accelerators that are not here.

Such a mesh has the name of a target (``planning.chips.target``) and no devices. Tracing and planning need no more, and
``compile.py`` compiles for it.
"""

from __future__ import annotations

from functools import partial

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from ..mesh import DATA_AXIS
from ..planning.chips import Target, chip_of, target
from ..training.programs import register_compiler
from .compile import compile_for_target


def mesh(spec: str, *, axis: str = DATA_AXIS) -> AbstractMesh:
    """Builds the one-dimensional mesh of a target, to trace, plan and compile for.

    Raises:
        ValueError: As ``target``.

    Example:
        >>> dict(mesh("h100:4x8").shape)
        {'data': 32}
    """
    named = target(spec)
    device = AbstractDevice(device_kind=named.spec, num_cores=None, platform=named.platform)
    register_compiler(device, partial(compile_for_target, named))
    return AbstractMesh((named.num_devices,), (axis,), axis_types=(AxisType.Auto,), abstract_device=device)


def target_of(mesh: Mesh | AbstractMesh) -> Target | None:
    """Gives the target that a mesh was made for; None if it is one of real devices.

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

    Raises:
        ValueError: If the devices are of no known chip, or too many or few for its topology.
    """
    if (named := target_of(mesh)) is not None:
        return named
    assert isinstance(mesh, Mesh)
    return target(f"{chip_of(mesh.devices.flat[0].device_kind).name}:{mesh.size}")
