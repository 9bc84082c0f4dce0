"""How gradients and shards are communicated. Buckets are planned by ``jaxddp.communication.buckets``.

collectives.py   all-reduce, reduce-scatter, all-gather and the others, one collective operation each
ring.py          the ring algorithms, built from sends to a neighbour
buffers.py       a bucket's tensors packed into one buffer
sharding.py      how tensors are cut into shards; a bucket's chunks packed into one buffer
hooks.py         how a bucket is summed over ranks: in its own dtype, or in one of 2 bytes
"""
