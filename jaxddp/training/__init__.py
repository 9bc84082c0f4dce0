"""The trainer, what a rank computes in a step, and the programs made of it.

train.py                         ``Trainer``
step.py                          one rank's step: accumulate, reduce, clip, update, gather
wide_products.py                 gradients that bfloat16 products write in float32
programs.py                      traces, plans and compiles the step, once per shape
placement.py                     puts full arrays on the mesh, as whole leaves or in shards, and gathers them
validation.py, agreement.py      checks of states and batches; of batches in several processes
model_state.py, ema.py           state beside the parameters; their moving average
evaluation.py, replicas.py       measures of batches of any length; whether ranks still hold the same
own_loop.py                      for a loop of one's own: gradients, reduced as planned
xla.py                           compile options that keep the plan
jit_baseline.py                  plain ``jit``, which the strategies are compared with
data.py, clock.py, allocator.py  text batches; timing; freed memory kept in the process
"""
