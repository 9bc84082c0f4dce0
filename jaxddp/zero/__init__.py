"""ZeRO: data parallelism whose training state is sharded over the ranks."""

from .stage3 import layer as layer, zero3 as zero3
from .stages_1_and_2 import zero1 as zero1, zero2 as zero2
