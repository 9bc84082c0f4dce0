"""Models to train: transformer.py; functional.py has them by name, and their loss."""

from ..sizes import SIZES as SIZES, TransformerConfig as TransformerConfig
from .functional import abstract as abstract, build as build, cross_entropy as cross_entropy, loss_fn as loss_fn
from .transformer import Transformer as Transformer, rotary_tables as rotary_tables
