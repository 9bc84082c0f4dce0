"""Imports JAX without the messages of the CUDA plugin on machines without a driver.

With the extra ``targets`` and without a GPU, importing and starting JAX prints a line of C++ for each library of the
plugin. Only command lines suppress them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

_PLUGIN_LINES = (b"cudart_stub.cc", b"before absl::InitializeLog() is called")


def import_jax() -> None:
    """Imports JAX, and keeps it from loading CUDA plugins where there is no device; call it before JAX is imported."""
    if "jax" in sys.modules:
        return
    with _without_plugin_lines():
        from .. import plugins

        # The compilers for targets load them in processes of their own.
        plugins.disable_plugins(plugins.superseded_plugins() if plugins.has_device_files() else plugins.cuda_plugins())


def import_jax_on_cpu() -> None:
    """Imports JAX to compile for targets, which needs no accelerator."""
    import_jax()
    import jax

    jax.config.update("jax_platforms", "cpu")


@contextlib.contextmanager
def _without_plugin_lines() -> Iterator[None]:
    """Holds back standard error, then prints all but the CUDA plugin's lines."""
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
