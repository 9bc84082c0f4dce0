"""Which JAX plugins are installed, and whether JAX should start them.

Those of the extra ``targets`` have no devices here: then CUDA's fails, and the TPUs' searches the network for hosts.
"""

import contextlib
import os
import sys
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


def import_jax() -> None:
    """Imports JAX for a command line: without CUDA plugins where there is no device, nor the lines that they print."""
    if "jax" in sys.modules:
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # closed, as in a daemon: nobody reads the lines
            standard_error = os.dup(2)
            stack.callback(os.close, standard_error)
            stack.callback(os.dup2, standard_error, 2)
            os.dup2(stack.enter_context(open(os.devnull, "w")).fileno(), 2)
        import_module("jax")
        if not has_device_files():
            for name in cuda_plugins():  # the compilers for targets load them in processes of their own
                import_module(f"jax_plugins.{name}").initialize = lambda: None  # type: ignore[attr-defined]


def devices() -> list[Any]:
    """Starts JAX, on the CPU where no platforms are named and no installed plugin has a device; lists its devices."""
    import jax

    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    # How to recognise the devices of other plugins is not known here.
    if not platforms and not has_device_files() and set(_plugins()) <= set(cuda_plugins()):
        jax.config.update("jax_platforms", "cpu")
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # CUDA without a driver raises the latter, without a message
        if not platforms:
            raise
        found = error or "no driver"
        raise ValueError(f"JAX_PLATFORMS (={platforms}) must name platforms that this machine has: {found}") from error


def cuda_plugins() -> list[str]:
    """Lists the installed plugins for CUDA, the newest last."""
    return sorted(name for name in _plugins() if name.startswith("xla_cuda"))


def has_device_files() -> bool:
    """Whether the machine has a GPU or a TPU."""
    return any(glob(pattern) for pattern in _DEVICE_FILES)


def _plugins() -> list[str]:
    package = find_spec("jax_plugins")
    folders = package.submodule_search_locations if package is not None else None
    return [module.name for module in iter_modules(folders or [])]
