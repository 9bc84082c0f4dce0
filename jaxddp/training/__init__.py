"""The trainer, what a rank computes in a step, and the programs made of it."""
