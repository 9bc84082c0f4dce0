"""``python -m jaxddp``: the commands. Their modules import slow ones only when they run, so help is quick.

train.py, train_program.py                                    train: the command and its options, the program
inspect.py, inspect_trace.py                                  inspect: the command and its output, a profile
plan.py                                                       plan: whether a step fits, by formulas
doctor.py                                                     doctor: what this machine has, what will not work
quiet.py                                                      JAX without the messages of CUDA plugins
interrupts.py                                                 signals of schedulers
launch.py                                                     launch: a script as several processes
parser.py                                                     running a command: errors in one line
"""
