"""How gradients travel: collectives, buckets, shards, compression, and the reductions made of them."""
