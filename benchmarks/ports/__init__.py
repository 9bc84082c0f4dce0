"""Public programs of both frameworks, written anew in small, before and after they were moved onto the packages.

measure.py    the table: lines, and the largest difference of weights
train.py      runs a program in its framework, on one device or rank and on several

Every other file is a program: what both forms share, then ``before`` and ``after``.
"""
