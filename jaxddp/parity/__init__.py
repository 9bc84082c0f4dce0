"""Your own training, step or model beside one device and PyTorch: which part differs, and where first."""

from .modules import first_difference as first_difference, mark as mark
from .step import StepParityError as StepParityError, check_step as check_step
from .trainings import ParityError as ParityError, Result as Result, check as check
