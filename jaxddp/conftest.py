"""Eight simulated devices for every test and example of this package, and faster compilation.

Tests and the processes that they start see no GPU, unless they are marked ``gpu``.
"""

import os
import signal

_PINNED = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
_GIVEN = {name: os.environ.get(name) for name in _PINNED}
os.environ.update(_PINNED)  # before JAX is imported

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxddp.mesh import simulate_devices  # noqa: E402

if jax.__version_info__ < (0, 11):
    # XLA's older code generator for CPUs compiles in half the time; later versions have dropped the flag.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()
simulate_devices(8)
# A shell makes its background jobs ignore Ctrl-C, and all that they start; tests of interrupts send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# LLVM optimises less; XLA's operations, collectives and memory stay the same. Tests compile thousands of programs, each
# of which runs for a moment.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.hookimpl(tryfirst=True)  # before xdist starts its processes
def pytest_cmdline_main(config):
    """Tests of GPUs run in one process, so that nothing runs beside what they time."""
    if "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr:
        config.option.numprocesses, config.option.dist = 0, "no"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Gives the GPUs back to tests of them, without preallocation: both frameworks' processes use them in turn."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    given = {name: value for name, value in _GIVEN.items() if value is not None}
    changed = dict.fromkeys(_PINNED) | given | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    before = {name: os.environ.get(name) for name in changed}
    try:
        _set(changed)
        return (yield)
    finally:
        _set(before)


def _set(variables):
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def optimized():
    """Machine code as users get it, for tests of its speed or vectorisation."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
