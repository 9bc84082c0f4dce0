"""Benchmarks of jaxddp and torchref: ``python -m benchmarks``.

benchmark.py, registry.py        a benchmark is one value; the runner; their names
render.py                        tables for the console, table.md and the page; figures
ranks.py, lab.py                 how ranks run; a slow network on one machine
timing.py                        interleaved rounds, ratios with 95 % intervals
training/                        a training run under several strategies, measured in both frameworks
strategies.py gates.py buckets.py scaling.py memory.py   the benchmarks that train
calibrate.py, published.py       what is predicted beside what runs here, and beside what others published
collectives.py collective_cases.py collective_calls.py   collectives by size
soak.py                          training under faults
public_programs.py               what public programs compile to
"""
