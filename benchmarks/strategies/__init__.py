"""Strategies side by side, and beside the frameworks' own data parallelism.

benchmark.py   the runs that are compared
section.py     columns, figures and sentences
"""
