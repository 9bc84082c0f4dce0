"""Checkpoints that any strategy on any number of ranks restores; rank_state.py has what a rank holds of one."""

from .checkpoints import Checkpoints as Checkpoints
