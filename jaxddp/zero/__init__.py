"""ZeRO: data parallelism whose training state is sharded over the ranks.

stage1.py, stage2.py, stage3.py          the strategies: sharded optimizer state, gradients, parameters
shard_optimizer.py                       stage 1 as an optax transformation
leaves.py                                stages 1 and 2: owners of whole parameters
clipping.py, elementwise.py              clipping on shards; which optimizers can run on shards
layers.py, remat.py, gather.py           stage 3: units, what their backward keeps, gathers and scatters
ordering.py, traced.py                   stage 3: prefetch limit, planned collectives

torchref has clipping.py at its top, because all of its wrappers clip: in zero/ it would be imported in a circle.
Layers and their order are here because only stage 3 uses them.
"""

from .layers import layer as layer
from .stage1 import zero1 as zero1
from .stage2 import zero2 as zero2
from .stage3 import zero3 as zero3
