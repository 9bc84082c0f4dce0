"""ZeRO: data parallelism whose training state is sharded over the ranks.

stages_1_and_2.py, stage3.py             the strategies: sharded optimizer state, gradients, parameters
layers.py, gather.py, ordering.py        stage 3: units, their gathers and scatters, and how many are in flight
owners.py                                stages 1 and 2: owners of whole parameters
elementwise.py                           which optimizers can run on shards, and how their state lies
"""

from .layers import layer as layer
from .stage3 import zero3 as zero3
from .stages_1_and_2 import zero1 as zero1
from .stages_1_and_2 import zero2 as zero2
