"""A slow network, made on one machine, and the benchmarks that run over it."""
