"""The trainer, what a rank computes in a step, and the programs made of it.

train.py, step.py                ``Trainer``; one rank's step: accumulate, reduce, clip, update; plain ``jit``'s
wide_products.py                 gradients that bfloat16 products write in float32
programs.py                      traces, plans and compiles the step, once per shape
placement.py, xla.py             full arrays or shards on the mesh, and back; compile options that keep the plan
validation.py, agreement.py      checks of states and batches; of batches in several processes
evaluation.py, replicas.py       measures of batches of any length; whether ranks still hold the same
own_loop.py, ema.py              for a loop of one's own; a moving average of the parameters
data.py, clock.py, allocator.py  text batches; timing; freed memory kept in the process
"""
