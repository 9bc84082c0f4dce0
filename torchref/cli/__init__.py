"""``python -m torchref``: the commands, which share options and output with those of ``jaxddp.cli``.

train.py, train_loop.py   train: the command, the run
"""
