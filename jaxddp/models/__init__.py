"""Models to train: toy.py, transformer.py; functional.py has all of them by name, and their losses."""

from ..sizes import SIZES as SIZES, TransformerConfig as TransformerConfig
from .functional import abstract as abstract, build as build, cross_entropy as cross_entropy, loss_fn as loss_fn
from .transformer import Transformer as Transformer, rotary_tables as rotary_tables
