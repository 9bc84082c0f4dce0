"""ZeRO: data parallelism that keeps each part of the training state on one rank only."""

from .. import ddp as ddp  # registers its strategies before those below, in whichever order they are used
from .layers import layer as layer
from .stage1 import zero1 as zero1
from .stage2 import zero2 as zero2
from .stage3 import zero3 as zero3
