"""Looks at training steps from outside: compiled for machines that are not here, read back, simulated.

targets.py      machines that are not here: meshes that stand for them, and compiling for them (compile_process.py)
hlo.py          the text of a compiled program parsed: computations, instructions, shapes
work.py         FLOPs and bytes of its instructions
schedule.py     its operations and collectives in schedule order, and how far collectives overlap the backward
memory.py       the memory of a state and of a step by component
simulate.py     the time of a step on a device and a network, and the bound that no schedule can beat
timeline.py     simulated steps as a picture
trace.py        what ran, from profiles of jax.profiler and of Kineto
collectives.py  the collectives of any program: kind, bytes, loops, phase, line: ``jaxddp.collectives``
inspect.py      steps of several strategies, compiled and simulated: ``python -m jaxddp inspect``
testdata/       programs of several platforms and versions of JAX, for tests
"""
