"""Models to train: toy.py, transformer.py; functional.py has all of them by name, and their losses."""

from jaxddp.sizes import SIZES as SIZES
from jaxddp.sizes import TransformerConfig as TransformerConfig

from .functional import build as build
from .functional import cross_entropy as cross_entropy
from .functional import loss_fn as loss_fn
from .functional import mean_squared_error as mean_squared_error
from .toy import FrozenToy as FrozenToy
from .toy import TiedToy as TiedToy
from .toy import ToyMLP as ToyMLP
from .toy import UnusedToy as UnusedToy
from .transformer import Attention as Attention
from .transformer import Block as Block
from .transformer import FeedForward as FeedForward
from .transformer import Transformer as Transformer
from .transformer import rotary_tables as rotary_tables
from .transformer import rotate as rotate
