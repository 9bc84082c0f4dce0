"""The commands of ``python -m jaxddp``."""
