"""What all benchmarks share.

options.py, console.py                    command-line options; progress
ranks.py, cores.py, free_memory.py        ranks in both frameworks; their cores; the memory that they may use
job_hosts.py, exchange.py                 ranks on all hosts of a job; what hosts exchange
run.py, results.py                        a run and its parts; its folder and commit
values.py, tables.py                      fields of rows; tables from one description of the columns
ratios.py, intervals.py, steal_time.py    ratios with confidence intervals; unions of intervals; steal time
jax_profile.py                            what JAX's profiler has recorded
"""
