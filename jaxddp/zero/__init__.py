"""ZeRO: data parallelism whose training state is sharded over the ranks.

stages_1_and_2.py   the optimizer's state is sharded, and gradients
stage3.py           parameters as well: units of a model gather theirs
gather.py           the gathers and scatters of units, and how many are in flight
owners.py           stages 1 and 2: owners of whole parameters
elementwise.py      which optimizers can run on shards, and how their state lies
"""

from .stage3 import layer as layer, zero3 as zero3
from .stages_1_and_2 import zero1 as zero1, zero2 as zero2
