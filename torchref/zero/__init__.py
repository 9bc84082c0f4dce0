"""ZeRO: data parallelism whose training state is sharded over the ranks.

stage1.py, stage2.py, stage3.py   the strategies: sharded optimizer state, gradients, parameters
zero_optimizer.py                 stages 1 and 2 as a torch optimizer, with the state of one process
sharded_optimizer.py              an older reading of stage 1: whole parameters are dealt out to ranks
elementwise.py, optimizers.py     which optimizers can run on shards; parameter groups and state dicts
units.py, gather.py               stage 3: modules that gather their parameters; the gather as an autograd function

clipping.py is at the top, because all wrappers clip: here it would be imported in a circle. jaxddp clips shards in
zero/, where its layers and their order are as well; modules and hooks replace those here.
"""

from .sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from .stage1 import ZeRO1 as ZeRO1
from .stage2 import ZeRO2 as ZeRO2
from .stage3 import FSDP as FSDP
from .zero_optimizer import ZeROOptimizer as ZeROOptimizer
