"""The data mesh and the ranks on it.

A rank is one device of a one-dimensional mesh with axis ``"data"``. The same strategies run on three kinds of ranks:
simulated CPU devices in one process, the accelerators of one machine, and the devices of several processes or hosts
joined by ``jax.distributed``. This is the only file that makes a mesh of devices.
"""

from __future__ import annotations

import contextlib

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from .plugins import devices

DATA_AXIS = "data"


def simulate_devices(num_devices: int) -> None:
    """Makes JAX present the CPU as several devices; call it before anything else uses JAX.

    Calling it again is harmless as long as enough devices exist.

    Args:
        num_devices: Number of CPU devices.

    Raises:
        ValueError: If JAX has already started with fewer devices, or ``num_devices`` is not a positive integer.

    Example:
        >>> simulate_devices(4)
        >>> len(jax.devices()) >= 4
        True
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices (={num_devices!r}) must be a positive integer")
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and jax.device_count() >= num_devices:
            return
        raise ValueError(
            f"num_devices (={num_devices}) cannot be simulated: JAX has already started with "
            f"{jax.device_count()} {jax.default_backend()} device(s); call simulate_devices before using JAX"
        ) from error


def mesh_of_machine(num_ranks: int | None, default_simulated: int) -> Mesh:
    """Builds the mesh on the machine's accelerators, or on simulated CPU devices if it has none.

    Args:
        num_ranks: Number of ranks; if None, all accelerators, or ``default_simulated`` CPU devices.
        default_simulated: Number of simulated devices if ``num_ranks`` is None.

    Returns:
        The mesh, as ``data_mesh`` makes it.

    Raises:
        ValueError: If there are not that many devices, or none that JAX could start on.
    """
    # The platform is chosen later. Once JAX has started, the number of CPU devices cannot change.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", num_ranks or default_simulated)
    try:
        found = devices()
    except RuntimeError as error:
        raise ValueError(f"JAX finds no device to run on: {error}") from error
    if num_ranks is None and found[0].platform == "cpu":
        num_ranks = min(default_simulated, len(found))
    return data_mesh(num_ranks)


def data_mesh(num_ranks: int | None = None, *, axis: str = DATA_AXIS) -> Mesh:
    """Builds the one-dimensional mesh that data parallelism runs on.

    Args:
        num_ranks: Number of ranks, the first of ``jax.devices()``; all of them if None.
        axis: Name of the mesh axis.

    Returns:
        A ``Mesh`` of shape ``[num_ranks]`` with automatic sharding along ``axis``.

    Raises:
        ValueError: If ``num_ranks`` is not positive, more than the devices, or, with several processes, less.

    Example:
        >>> dict(data_mesh(4).shape)
        {'data': 4}
    """
    found = devices()
    if num_ranks is None:
        num_ranks = len(found)
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ValueError(f"num_ranks (={num_ranks!r}) must be a positive integer")
    if num_ranks > len(found):
        raise ValueError(
            f"num_ranks (={num_ranks}) must be at most the number of devices (={len(found)} {found[0].platform});"
            f" to simulate them, call jaxddp.simulate_devices({num_ranks}) before JAX starts, or say --simulate"
        )
    if num_ranks < len(found) and jax.process_count() > 1:
        raise ValueError(
            f"num_ranks (={num_ranks}) must be all devices of the {jax.process_count()} processes (={len(found)}):"
            " a process without a rank would wait for the others for ever"
        )
    return jax.make_mesh((num_ranks,), (axis,), axis_types=(AxisType.Auto,), devices=found[:num_ranks])


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Gives the platform of a mesh's devices: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""
    if isinstance(mesh, AbstractMesh):
        return mesh.abstract_device.platform
    return mesh.devices.flat[0].platform
