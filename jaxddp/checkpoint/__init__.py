"""Checkpoints that any strategy on any number of ranks restores, and weights for other frameworks.

checkpoints.py   saves and restores training states
folder.py        complete checkpoints in a folder: which are kept, passed over, locked; torchref shares it
host_state.py    a state on the host, in full, and back on the ranks
weights.py       arrays by name in an ``.npz`` file: states, and weights for others
interop.py       Flax parameters as a PyTorch ``state_dict``, and back
"""
