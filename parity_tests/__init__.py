"""Proof that jaxddp, torchref and single-process training give the same weights."""
