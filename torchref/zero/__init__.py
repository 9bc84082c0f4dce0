"""ZeRO: data parallelism whose training state is sharded over the ranks.

stages_1_and_2.py, stage3.py   the strategies; of stage 3, gather.py has the modules that gather their parameters
owners.py                      an older reading of stage 1: whole parameters are dealt out to ranks
optimizers.py                  which optimizers can run on shards; parameter groups and state dicts
"""

from .owners import ShardedOptimizer as ShardedOptimizer
from .stage3 import FSDP as FSDP
from .stages_1_and_2 import ZeRO1 as ZeRO1, ZeRO2 as ZeRO2
