"""Plans a training step for a cluster that is not here, by formulas that need NumPy and the standard library only."""
