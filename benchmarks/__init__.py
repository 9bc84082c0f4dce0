"""Benchmarks of jaxddp and torchref: ``python -m benchmarks``."""
