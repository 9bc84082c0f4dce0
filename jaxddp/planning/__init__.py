"""Plans a training step for a cluster that is not here, by formulas that need NumPy and the standard library only.

chips.py      published numbers of accelerators, and target specs such as ``h100:8``
products.py   measured rates of matrix products and memory
machine.py    networks of targets; what a cluster computes, holds and sends, for the formulas below
plan.py       whether a training step fits a cluster and keeps it busy
workload.py   parameters, FLOPs and activations of a model
formulas.py   bytes by ZeRO stage, bytes sent, exposed buckets, compute-bound batches
"""
