"""Looks at training steps from outside: compiled for machines that are not here, read back, simulated."""
