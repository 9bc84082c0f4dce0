"""Machines that are not here, and compiling for them."""

from .chips import CHIPS as CHIPS
from .chips import Chip as Chip
from .target import Target as Target
from .target import mesh as mesh
from .target import target as target
from .target import target_like as target_like
from .target import target_of as target_of
