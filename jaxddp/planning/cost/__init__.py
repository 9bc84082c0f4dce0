"""What training costs, as formulas: each in the file of its concept, with its derivation; none uses a framework.

Sizes are bytes of 8 bits, times seconds, rates per second; arguments that a plot would sweep may be NumPy arrays.
"""
