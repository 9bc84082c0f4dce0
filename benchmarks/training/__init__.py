"""A training run under several strategies, side by side in both frameworks: what most benchmarks measure."""
