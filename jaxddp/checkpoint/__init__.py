"""Checkpoints that any strategy on any number of ranks restores, and weights for other frameworks.

checkpoints.py   saves and restores training states
host_state.py    a state on the host, in full, and back on the ranks
weights.py       weights alone, as ``.npz`` or ``.safetensors``
interop.py       Flax parameters as a PyTorch ``state_dict``, and back
"""

from .checkpoints import Checkpoints as Checkpoints
