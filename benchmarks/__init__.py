"""Benchmarks of jaxddp and torchref: ``python -m benchmarks``.

registry.py, suite.py   the benchmarks, one entry each; several of them as one run
harness/                options, ranks, runs, results, tables
training/               a training run under several strategies, measured in both frameworks
report/                 the page of a run
lab/                    a slow network on one machine
main/ strategies/ buckets/ gates/ collectives/ compilation/ memory/ scaling/ traces/ soak/ all/   the benchmarks
"""
