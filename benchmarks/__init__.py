"""Benchmarks of jaxddp and torchref: ``python -m benchmarks``; each is one value in a file of its own."""
