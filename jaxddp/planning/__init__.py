"""Formulas and plans that need no framework: NumPy and the standard library only.

buckets.py   bucket plans and chunk arithmetic, shared by ``jaxddp`` and ``torchref``
sizes.py     sizes of the transformer, shared by both packages' models
chips.py     published numbers of accelerators, and target specs such as ``h100:8``
network.py   bandwidth and latency: how long a collective takes
machine.py   what a cluster computes, holds and sends, for the formulas below
plan.py      whether a training step fits a cluster and keeps it busy
cost/        the formulas themselves, one concept a file
"""
