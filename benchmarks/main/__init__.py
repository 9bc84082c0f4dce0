"""The main job: every strategy in both frameworks.

benchmark.py   the setup and the order of its parts
section.py     columns and figures
"""
