"""The trainer, what a rank computes in a step, and the programs made of it.

train.py, step.py                ``Trainer``; one rank's step: accumulate, reduce, clip, update; plain ``jit``'s
wide_products.py                 gradients that bfloat16 products write in float32
programs.py                      traces, plans and compiles the step, once per shape
placement.py                     puts full arrays on the mesh, as whole leaves or in shards, and gathers them
validation.py, agreement.py      checks of states and batches; of batches in several processes
ema.py                           a moving average of the parameters
evaluation.py, replicas.py       measures of batches of any length; whether ranks still hold the same
own_loop.py                      for a loop of one's own: gradients reduced as planned, sharded optimizers
xla.py                           compile options that keep the plan
data.py, clock.py, allocator.py  text batches; timing; freed memory kept in the process
"""
