import platform

import pytest

from jaxddp.conftest import run_python
from jaxddp.training.allocator import keep_freed_memory

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from jaxddp.training.allocator import keep_freed_memory
jax.config.update("jax_platforms", "cpu")
if sys.argv[1] == "keep":
    assert keep_freed_memory()
step = jax.jit(lambda x: jnp.sin(x @ x.T).sum())  # 64 MB of temporaries: glibc keeps up to 32 MiB by itself
x = jnp.ones((4000, 8))
faults = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults[10:])[10])  # the median step, once warm
"""


@pytest.mark.full
def test_steps_stop_touching_new_pages():
    if platform.libc_ver()[0] != "glibc":
        assert not keep_freed_memory()
        return
    keep, give_back = (int(run_python(PROGRAM, argument)) for argument in ("keep", "give back"))
    assert keep < give_back / 10
