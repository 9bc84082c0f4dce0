"""Machines that are not here, and compiling for them.

meshes      a mesh that stands for a machine, to give to ``Trainer``
compile     traces a function here and compiles it in a process of its own: job (parent), process (child)
steps       a trainer's step, compiled in the background, with and without communication
program     the result, or why there is none
devices     how the devices are described to XLA
"""

from ..planning.chips import CHIPS as CHIPS
from ..planning.chips import Chip as Chip
from ..planning.chips import Target as Target
from ..planning.chips import target as target
from .meshes import mesh as mesh
from .meshes import target_like as target_like
from .meshes import target_of as target_of
from .steps import start_compile as start_compile
from .steps import start_compile_without_communication as start_compile_without_communication
