"""A training run under several strategies in both frameworks: what most benchmarks measure.

setup.py                      what is trained, and whether it fits into memory
rank.py                       what a rank does: every variant timed in interleaved rounds, and their rows
jax_side.py, torch_side.py    each framework's runs and probes
"""
