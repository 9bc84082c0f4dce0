"""Checkpoints that any strategy on any number of ranks restores.

checkpoints.py   the checkpoints in a folder: saves, restores, keeps the newest
rank_state.py    a rank's part of a training state, and the whole
"""

from .checkpoints import Checkpoints as Checkpoints
