"""Eight simulated devices for every test and example of this package, and faster compilation."""

import os
import signal

import jax
import pytest

from jaxddp.mesh import simulate_devices

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


@pytest.fixture
def optimized():
    """Machine code as users get it, for tests of its speed or vectorisation."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
