"""``python -m jaxddp``: the commands. Their modules import slow ones only when they run, so help is quick.

train.py, train_options.py, train_loop.py, train_console.py   train: the command, its options, the run, its output
inspect.py, inspect_console.py                                inspect: the command, its output
plan.py, plan_console.py                                      plan: the command, its output
quiet.py                                                      JAX without the messages of CUDA plugins
interrupts.py                                                 Ctrl-C that is never lost
parser.py                                                     help with the names of strategies, errors in one line
"""
