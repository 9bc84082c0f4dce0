"""Soak: training for an hour while ranks are killed and stopped, the disk fills up, and the run is preempted.

benchmark.py   the run of each side, its rows
faults.py      the seeded list of faults
supervised.py  a job under its launcher: starts it, injects faults, observes what happens
guard.py       ends everything that a soak started, however the soak itself ends
program.py, jax_rank.py, torch_rank.py   what the ranks run
goodput.py, usage.py, section.py         where the time went, what processes use, the page
"""
