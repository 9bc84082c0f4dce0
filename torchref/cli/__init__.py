"""``python -m torchref``: the command ``train``, which shares options and output with that of ``jaxddp.cli``."""
