"""Strategies compiled for a target and compared: planned beside compiled."""
