"""The import and the start of JAX where plugins are installed for devices that are not there.

The extra ``targets`` installs compilers for GPUs and TPUs, which are JAX's plugins for these devices as well. JAX
loads plugins when it is imported and when it starts. Without their devices the CUDA plugin prints that there is no
driver, then a traceback, and the TPU plugin looks for its hosts in the network. Importing this module imports JAX
without these lines, and ``devices`` starts it without them and on the CPU; all else that is printed stays.

Where JAX has a CUDA 13 plugin of its own, the extra's is the second one for CUDA, and JAX would take either: here it
is always the one for CUDA 13.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_PLUGIN_LINES = (b"cudart_stub.cc", b"before absl::InitializeLog() is called")


def devices() -> list[jax.Device]:
    """Starts JAX if it has not started yet, and lists its devices.

    Where neither the environment nor the configuration names platforms, and the machine has no device of any
    installed plugin, it starts on the CPU alone.

    Returns:
        ``jax.devices()``.
    """
    import jax

    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    plugins = set(_plugins())
    # How to recognise the devices of other plugins is not known here.
    if not platforms and not _has_device_files() and plugins <= set(_cuda_plugins()):
        jax.config.update("jax_platforms", "cpu")
        if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:  # with it the plugin works without devices
            disable_plugins(plugins)
    with _without_plugin_lines():
        return jax.devices()


def superseded_plugins() -> list[str]:
    """Lists the installed plugins in whose place JAX has another: that for CUDA 12 beside one for CUDA 13."""
    return _cuda_plugins()[:-1]


def disable_plugins(names: Iterable[str]) -> None:
    """Keeps JAX from loading plugins; call it before JAX starts.

    Args:
        names: Modules of ``jax_plugins``.
    """
    for name in names:
        import_module(f"jax_plugins.{name}").initialize = lambda: None  # type: ignore[attr-defined]


def _plugins() -> list[str]:
    package = find_spec("jax_plugins")
    folders = package.submodule_search_locations if package is not None else None
    return [module.name for module in iter_modules(folders or [])]


def _cuda_plugins() -> list[str]:
    return sorted(name for name in _plugins() if name.startswith("xla_cuda"))


def _has_device_files() -> bool:
    return any(glob(pattern) for pattern in _DEVICE_FILES)


@contextlib.contextmanager
def _without_plugin_lines() -> Iterator[None]:
    """Holds back what is printed meanwhile, then prints all but the lines of the CUDA plugin that finds no driver."""
    if not _cuda_plugins() or _has_device_files():
        yield
        return
    try:
        standard_error = os.dup(2)
    except OSError:  # closed, as in a daemon: nobody reads the lines
        yield
        return
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(standard_error, 2)
            os.close(standard_error)
            held.seek(0)
            for line in held:
                if not any(part in line for part in _PLUGIN_LINES):
                    os.write(2, line)


with _without_plugin_lines():
    import jax  # noqa: F811

    disable_plugins(superseded_plugins())
