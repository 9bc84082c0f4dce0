"""``python -m torchref``: the commands, which share options and output with those of ``jaxddp.cli``.

train.py, train_program.py   train: the command, the program
"""
