"""Bucket sizes, measured beside predicted.

benchmark.py    times steps, all-reduces and both at once
prediction.py   the expected time of a step under a bucket plan
section.py      columns, figures and sentences
"""
