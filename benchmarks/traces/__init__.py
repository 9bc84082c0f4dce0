"""Steps under the frameworks' profilers.

parts.py                     the steps that are traced
jax_side.py, torch_side.py   traces recorded and read in each framework
overlap.py                   overlap of communication and computation
section.py                   timelines and columns
"""
