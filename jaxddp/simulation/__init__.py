"""Simulates compiled steps on a device and a network.

simulate.py   the time of a step: roofline for compute, queues for collectives
bound.py      the least time that any schedule can take
tuning.py     bucket caps for a network
timeline.py   pictures of simulated steps, and one line of text for terminals
trace.py      trace files for Perfetto
"""
