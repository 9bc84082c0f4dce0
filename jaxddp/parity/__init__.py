"""Your own training, step or model beside one device and PyTorch: which part differs, and where first."""

from .modules import first_difference as first_difference
from .modules import mark as mark
from .step import StepParityError as StepParityError
from .step import check_step as check_step
from .trainings import ParityError as ParityError
from .trainings import Result as Result
from .trainings import check as check
