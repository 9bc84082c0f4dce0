"""A model to train, by the names of its sizes, and its loss."""

from ..sizes import SIZES as SIZES, TransformerConfig as TransformerConfig
from .transformer import (
    Transformer as Transformer,
    abstract as abstract,
    build as build,
    cross_entropy as cross_entropy,
)
