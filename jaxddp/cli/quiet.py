"""Imports JAX for command lines: without CUDA plugins where there is no device, and without the lines that they print.

With the extra ``targets`` and without a GPU, each library of the plugin prints a line of C++.
"""

from __future__ import annotations

import contextlib
import os
import sys


def import_jax() -> None:
    """Imports JAX, and keeps it from loading CUDA plugins where there is no device; call it before JAX is imported."""
    if "jax" in sys.modules:
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # closed, as in a daemon: nobody reads the lines
            standard_error = os.dup(2)
            stack.callback(os.close, standard_error)
            stack.callback(os.dup2, standard_error, 2)
            os.dup2(stack.enter_context(open(os.devnull, "w")).fileno(), 2)
        from .. import plugins

        # The compilers for targets load them in processes of their own.
        plugins.disable_plugins(plugins.superseded_plugins() if plugins.has_device_files() else plugins.cuda_plugins())
