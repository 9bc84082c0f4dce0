"""How gradients travel: collectives, buckets, shards, compression."""
