"""How gradients and shards are communicated. Buckets are planned by ``jaxddp.communication.buckets``.

collectives.py, ring.py   collective operations, and the ring algorithms behind them
reduction.py, sharding.py a bucket's tensors, or their shards, packed into one buffer
hooks.py                  how a bucket is summed over ranks: in its own dtype, or in one of 2 bytes
"""
