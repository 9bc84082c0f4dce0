"""All strategies by name: importing this module registers those of ``ddp`` and ``zero``."""

from . import ddp as ddp
from . import zero as zero
from .strategy import STRATEGIES as STRATEGIES
from .strategy import make_strategy as make_strategy
