"""Reads compiled programs, from their scheduled HLO text.

hlo.py        the text parsed: computations, instructions, shapes
work.py       FLOPs and bytes of instructions
schedule.py   operations and collectives in schedule order, and how far collectives overlap the backward
liveness.py   which arrays are alive at each point of the schedule
memory.py     memory of a state and of a compiled step, by component
testdata/     programs of several platforms and versions of JAX, for tests
"""
