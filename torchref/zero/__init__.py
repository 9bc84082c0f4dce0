"""ZeRO: data parallelism whose training state is sharded over the ranks."""

# isort: skip_file
# STRATEGIES lists the stages in the order of these imports.
from .stage1 import ZeRO1 as ZeRO1
from .stage2 import ZeRO2 as ZeRO2
from .stage3 import FSDP as FSDP
from .sharded_optimizer import ShardedOptimizer as ShardedOptimizer
