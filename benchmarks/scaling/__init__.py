"""Strong and weak scaling.

benchmark.py    measured on this machine's ranks
simulation.py   simulated on targets
section.py      columns, figures and sentences
"""
