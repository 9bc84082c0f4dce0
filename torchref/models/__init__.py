"""A model to train, by the names of its sizes, and its loss."""

from jaxddp.sizes import SIZES as SIZES, TransformerConfig as TransformerConfig

from .transformer import Transformer as Transformer, build as build, cross_entropy as cross_entropy, loss_fn as loss_fn
