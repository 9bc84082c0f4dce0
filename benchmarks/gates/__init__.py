"""Upper limits on what a strategy may cost compared with what it replaces.

benchmark.py   the gates, measured and judged
section.py     columns and figures
"""
