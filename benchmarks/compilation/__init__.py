"""How long compilation takes.

benchmark.py   compiles steps for growing numbers of devices and parameters
points.py      one compilation, timed part by part
section.py     columns and figures
"""
