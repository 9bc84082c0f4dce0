"""Meshes of accelerators that are not here.

Such a mesh has the name of a target (``planning.chips.target``) and no devices. Tracing and planning need no more, and
``compile.py`` compiles for it.
"""

from __future__ import annotations

from functools import partial

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from ..arguments import check_kind
from ..mesh import DATA_AXIS, axes_of_ranks
from ..planning.chips import Target, chip_of, target
from ..training.programs import register_compiler
from .compile import compile_for_target


def mesh(spec: str, *, axis: str = DATA_AXIS, replicas: int = 1) -> AbstractMesh:
    """Builds the mesh of a target, to trace, plan and compile for; ``axis`` and ``replicas`` are as in ``data_mesh``.

    Raises:
        ValueError: As ``target`` and ``data_mesh``.

    Example:
        >>> dict(mesh("h100:4x8").shape)
        {'data': 32}
    """
    named = target(spec)
    device = AbstractDevice(device_kind=named.spec, num_cores=None, platform=named.platform)
    register_compiler(device, partial(compile_for_target, named))
    sizes = axes_of_ranks(named.num_devices, axis, replicas)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)


def mesh_like(mesh_of_devices: Mesh | AbstractMesh) -> AbstractMesh:
    """Builds the mesh, of the same axes, of the target that a mesh was made for or that its devices are.

    Raises:
        ValueError: As ``target_like``.
    """
    device = mesh(target_like(mesh_of_devices).spec).abstract_device
    like = mesh_of_devices
    return AbstractMesh(like.axis_sizes, like.axis_names, axis_types=like.axis_types, abstract_device=device)


def target_of(mesh: Mesh | AbstractMesh) -> Target | None:
    """Gives the target that a mesh was made for; None if it is one of real devices.

    Raises:
        ValueError: If the mesh has neither devices nor a target.
    """
    check_kind("mesh", mesh, (Mesh, AbstractMesh), "a mesh, such as jaxddp.data_mesh()")
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
