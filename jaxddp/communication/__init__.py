"""How gradients and shards are communicated.

collectives.py      all-reduce, reduce-scatter, all-gather and the others, one collective operation each
ring.py             the ring algorithms, built from sends to a neighbour
gloo.py             collectives of shards for processes on CPUs, where XLA's may give wrong sums, or are slow
buckets.py          plans the buckets; needs no framework, torchref uses it too
sharding.py         how tensors are cut into shards; a bucket's chunks packed into one buffer
hooks.py            how a bucket is summed instead of by an all-reduce: in bfloat16 or float16
reduction.py        carries out a bucket plan: pack, sum over ranks, divide, in an order that XLA keeps
traces.py           a reader of traced programs: the order in which a backward finishes the gradients, their plan
planned.py          what should be compiled: by a plan, and by the loss function and zero3's units themselves
"""
