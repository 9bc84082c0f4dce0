"""All collectives by size, ranks and backend.

benchmark.py                     the benchmark, part by part
cases.py, sizes.py               the collectives, their inputs and expected results; the sizes that fit into memory
part.py, interleaving.py         one backend with a number of ranks and its rows; interleaved timing
jax_side.py, torch_side.py       the collectives in each framework
fit.py, ratio.py                 latency and rate fitted to sizes; one backend's bandwidth over another's
forecast.py                      how long the rest will take
section.py                       columns, figures and sentences
"""
