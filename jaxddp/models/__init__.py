"""Models to train: toy.py, transformer.py; functional.py has all of them by name, and their losses."""

from ..sizes import SIZES as SIZES
from ..sizes import TransformerConfig as TransformerConfig
from .functional import abstract as abstract
from .functional import build as build
from .functional import cross_entropy as cross_entropy
from .functional import loss_fn as loss_fn
from .transformer import Transformer as Transformer
from .transformer import rotary_tables as rotary_tables
