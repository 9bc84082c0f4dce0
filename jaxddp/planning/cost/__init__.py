"""Training costs as formulas. Sizes are in bytes, times in seconds, rates per second; arguments may be NumPy arrays.

Every function raises a ValueError of one line for a number that is out of range.

workload.py     parameters, FLOPs and activations of a model
memory.py       bytes per device by ZeRO stage
traffic.py      bytes sent per rank and step, by strategy
scaling.py      when a step is compute-bound, and the best split of devices
overlap.py      exposed communication of gradient buckets, and the best number of buckets
contention.py   compute and communication that slow each other down
bandwidth.py    algorithm and bus bandwidth; latency and rate fitted to a sweep of sizes
checks.py       argument checks
testdata/       the figures of the accounting, each with its check
"""
