"""Your own training, step or model, compared: with one device, and with PyTorch.

trainings.py   ``check``: a training under every strategy, on one device, in PyTorch
step.py        ``check_step``: a step that is not ours, on one device and on several
modules.py     ``first_difference``: the first module in which a port and its PyTorch module part
comparing.py   what they share
"""

from .modules import first_difference as first_difference
from .modules import mark as mark
from .step import StepParityError as StepParityError
from .step import check_step as check_step
from .trainings import ParityError as ParityError
from .trainings import Result as Result
from .trainings import check as check
