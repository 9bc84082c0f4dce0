"""A training run under several strategies in both frameworks: what most benchmarks measure.

measure.py                           the setup, and the results
frameworks.py                        both frameworks, one after the other
interleaving.py, rounds.py           variants timed in interleaved rounds; those of a framework
jax_side.py, torch_side.py           every variant of a setup
jax_variants.py, torch_variants.py   strategies, and probes of their components
torch_peers.py                       PyTorch's own data parallelism
device_time.py                       steps timed on the GPU
steps.py                             rows of steps
"""
