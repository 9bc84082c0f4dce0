"""How gradients and shards are communicated. Buckets are planned by ``jaxddp.communication.buckets``.

collectives.py   all-reduce, reduce-scatter, all-gather and the others, one collective operation each
ring.py          the ring algorithms, built from sends to a neighbour
buffers.py       a bucket's tensors packed into one buffer
sharding.py      how tensors are cut into shards; a bucket's chunks packed into one buffer
compression.py   gradient compression: bfloat16, float16, PowerSGD, or no communication at all
low_rank.py      the arithmetic of PowerSGD
reduction.py     the two ways to sum a bucket over ranks, and the queue of collectives in flight
"""
