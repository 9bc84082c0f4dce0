"""The trainer, what a rank computes in a step, and the programs made of it.

train.py                         ``Trainer``
step.py                          one rank's step: accumulate, reduce, clip, update, gather
wide_products.py                 gradients that bfloat16 products write in float32
programs.py                      traces, plans and compiles the step, once per shape
state_layout.py, placement.py    which leaves of the state are sharded; puts them on the mesh and gathers them
validation.py, agreement.py      checks of states and batches; of batches in several processes
packing.py                       ``shard_map`` of functions of thousands of arrays
xla.py                           compile options that keep the plan
jit_baseline.py                  plain ``jit``, which the strategies are compared with
data.py, clock.py, allocator.py  text batches; timing; freed memory kept in the process
"""
