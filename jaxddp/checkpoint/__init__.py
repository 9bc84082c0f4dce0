"""Checkpoints that any strategy on any number of ranks restores, and weights for other frameworks."""
