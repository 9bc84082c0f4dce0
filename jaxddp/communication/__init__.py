"""Communication of gradients: collectives, buckets, shards, compression, and the reductions made of them."""
