"""How gradients and shards are communicated: twins of files in ``jaxddp.communication``, which plans the buckets."""
