"""A training run under several strategies in both frameworks: what most benchmarks measure."""
