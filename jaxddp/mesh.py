"""The data mesh and the ranks on it.

A rank is one device of a mesh with the axis ``"data"``, or ``"replica"`` and ``"data"`` for hybrid sharding: simulated
on the CPU, an accelerator of one machine, or of several processes. Only this file makes meshes.
"""

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from .arguments import check_integer
from .plugins import devices

DATA_AXIS = "data"
REPLICA_AXIS = "replica"


def simulate_devices(num_devices: int) -> None:
    """Makes JAX present the CPU as several devices; a RuntimeError if JAX has already started with fewer."""
    num_devices = check_integer("num_devices", num_devices)
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        if jax.default_backend() != "cpu" or jax.device_count() < num_devices:
            raise


def data_mesh(num_ranks: int | None = None, *, axis: str = DATA_AXIS, replicas: int = 1) -> Mesh:
    """Builds the mesh of data parallelism, ``[num_ranks]`` along ``axis``; a ValueError if it does not fit the devices.

    Args:
        num_ranks: Number of ranks, the first of ``jax.devices()``; all of them if None.
        axis: Name of the mesh axis.
        replicas: Groups of consecutive ranks, such as one a host, that ZeRO shards within; each holds all of the state.
            Then the mesh is ``[replicas, num_ranks / replicas]`` along ``("replica", axis)``.

    Example:
        >>> dict(data_mesh(4).shape), dict(data_mesh(8, replicas=2).shape)
        ({'data': 4}, {'replica': 2, 'data': 4})
    """
    found = devices()
    num_ranks = check_integer("num_ranks", len(found) if num_ranks is None else num_ranks)
    if num_ranks > len(found):
        there = f"num_ranks (={num_ranks}) must be at most the number of devices (={len(found)} {found[0].platform})"
        raise ValueError(f"{there}; jaxddp.simulate_devices({num_ranks}) before JAX starts makes them")
    if num_ranks < len(found) and jax.process_count() > 1:
        there = f"num_ranks (={num_ranks}) must be all devices of the {jax.process_count()} processes (={len(found)})"
        raise ValueError(f"{there}: a process without a rank would wait for the others for ever")
    sizes = axes_of_ranks(num_ranks, axis, replicas)
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=found[:num_ranks])


def axes_of_ranks(num_ranks: int, axis: str, replicas: int) -> dict[str, int]:
    """The names and sizes of the axes of ``data_mesh``; raises as it does."""
    replicas = check_integer("replicas", replicas)
    if replicas == 1:
        return {axis: num_ranks}
    if axis == REPLICA_AXIS:
        raise ValueError(f"axis (={axis!r}) must not be the axis of the replicas")
    if num_ranks % replicas or num_ranks == replicas:
        raise ValueError(f"replicas (={replicas}) must divide num_ranks (={num_ranks}) into groups of at least 2 ranks")
    return {REPLICA_AXIS: replicas, axis: num_ranks // replicas}


def rank_axis(mesh: Mesh | AbstractMesh, given: str | tuple[str, ...] | None = None) -> str | tuple[str, ...]:
    """The axis of a mesh along which ranks lie, or both if it has replicas; ``given`` is the user's choice."""
    names = mesh.axis_names
    if given is not None:
        chosen = (given,) if isinstance(given, str) else given
        if not chosen or not {*chosen} <= {*names} or len({*chosen}) < len(chosen):
            raise ValueError(f"axis (={given!r}) must be of the mesh, whose axes are {', '.join(names)}")
        return chosen if len(chosen) > 1 else chosen[0]
    if len(names) == 1:
        return names[0]
    if len(names) == 2 and names[0] == REPLICA_AXIS:
        return names
    raise ValueError(
        f"mesh axes (={names}) must be one, or {REPLICA_AXIS!r} and another, as jaxddp.data_mesh makes them, or come"
        " with axis= of the ranks and param_specs= for the others"
    )


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Gives the platform of a mesh's devices: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""
    if isinstance(mesh, AbstractMesh):
        return mesh.abstract_device.platform
    return mesh.devices.flat[0].platform
