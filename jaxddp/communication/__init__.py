"""How gradients and shards are communicated."""
