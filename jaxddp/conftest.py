"""Eight simulated devices for every test and example of this package, and machine code made in less time."""

import signal

import jax
import pytest

from jaxddp.mesh import simulate_devices

simulate_devices(8)
# A shell makes its background jobs ignore Ctrl-C, and all that they start; tests of interrupts send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Only LLVM does less: what XLA makes of a step, its operations, collectives and memory, is the same. It compiles the
# machine code of thousands of programs here, each of which runs for a moment.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def optimized():
    """Machine code as users get it, where its speed matters, or whether a loop is made of vectors."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
