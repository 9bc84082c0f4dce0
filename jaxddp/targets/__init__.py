"""Machines that are not here, and compiling for them."""

from ..planning.chips import CHIPS as CHIPS
from ..planning.chips import Chip as Chip
from ..planning.chips import Target as Target
from ..planning.chips import target as target
from .meshes import mesh as mesh
from .meshes import target_like as target_like
from .meshes import target_of as target_of
