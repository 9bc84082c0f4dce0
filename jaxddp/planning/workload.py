"""Counts of a model: parameters, FLOPs, elements that tensor parallelism reduces, elements kept for the backward.

Elements per token of a forward; a product with an m x n matrix takes 2 m n FLOPs. Of L blocks with the widths D and F,
a context of T and H heads, each keeps for the backward:

    feed-forward   D, the input, in full on every rank, and F split by tensor parallelism, which sums D; 3 F if gated
    attention      4 D in full (both norms and their results), 4 D split (query, key, value, mix), H T of weights

Flash attention multiplies half of the square, keeps no weights, and has 5 products in the backward. What checkpointing
(Korthikanti et al., MLSys 2023) computes again, and keeps:

    selective   all but attention and every second product    the block's input, the mix, half of what is split
    full        the whole block                               the block's input

Memory-bound kernels of a fused forward read and write 13 D + 3 F elements per block, and 4 H T for weights that are
kept; operation by operation, as PyTorch without compile, 36 D + 5 F and 12 H T.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Attention(NamedTuple):
    """The attention of all blocks: ``flops_per_token`` of a forward, over ``context`` tokens."""

    num_heads: int
    width: int
    context: int
    is_flash: bool
    flops_per_token: int


@dataclass
class Workload:
    """Counts of one model; elements, and ``flops_per_token``, are per token of a forward."""

    tensors: Shapes  # names and shapes of the parameters, in forward order
    unit_tensors: tuple[int, ...]  # number of tensors of each unit that zero3 gathers at once
    summed_per_token: int  # elements that tensor parallelism all-reduces
    kept_per_token: int  # elements kept for the backward in full on every tensor-parallel rank
    kept_cut_per_token: int  # those that are split over tensor-parallel ranks
    products: tuple[tuple[int, int, int], ...]  # how many matrices of inputs x outputs a token is multiplied with
    attention: Attention | None = None
    moved_per_token: int = 0  # elements that memory-bound kernels of a fused forward read and write
    moved_unfused_per_token: int = 0
    recomputed: float = 0.0  # share of the forward's products that the backward computes again

    def __post_init__(self) -> None:
        self.tensor_elements = [math.prod(shape) for _, shape in self.tensors]  # of each parameter, in forward order
        self.num_params = sum(self.tensor_elements)
        self.products_flops = sum(2 * count * rows * columns for count, rows, columns in self.products)  # per token
        self.flops_per_token = self.products_flops + (self.attention.flops_per_token if self.attention else 0)
        sizes = iter(self.tensor_elements)
        self.unit_params = [sum(itertools.islice(sizes, count)) for count in self.unit_tensors]  # of each unit


def feed_forward(width: int, hidden: int, num_blocks: int = 1, num_matrices: int = 2) -> Workload:
    """Counts the feed-forward model: D is ``width``, F ``hidden``, L ``num_blocks``, k ``num_matrices``, 2 or 3."""
    block = (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width)))[3 - num_matrices :]
    return Workload(
        tensors=tuple((f"blocks.{index}.{name}", shape) for index in range(num_blocks) for name, shape in block),
        unit_tensors=(num_matrices,) * num_blocks,
        summed_per_token=width * num_blocks,
        kept_per_token=width * num_blocks,
        kept_cut_per_token=(hidden if num_matrices == 2 else 3 * hidden) * num_blocks,
        products=((num_blocks * (num_matrices - 1), width, hidden), (num_blocks, hidden, width)),
    )


def transformer(
    vocab: int, context: int, width: int, num_layers: int, num_heads: int, hidden: int, *, is_flash: bool = False,
    checkpointing: str = "none", kv_heads: int | None = None, num_matrices: int = 3, is_tied: bool = False,
    is_causal: bool = True,
) -> Workload:  # fmt: skip
    """Counts the decoder-only transformer of ``jaxddp.models``, or one that differs from it as the keywords say.

    It has ``2 V D + L (4 D^2 + 3 D F + 2 D) + D`` parameters, with V for ``vocab``, L for ``num_layers``. What is not
    gated has 2 matrices in a feed-forward; a head that ``is_tied`` is the embedding. Biases are neglected.
    """
    mlp = feed_forward(width, hidden, num_layers, num_matrices)
    narrow = width // num_heads * (kv_heads or num_heads)
    block = (
        ("attention_norm", (width,)),
        ("attention.query", (width, width)),
        ("attention.key", (width, narrow)),
        ("attention.value", (width, narrow)),
        ("attention.output", (width, width)),
        ("mlp_norm", (width,)),
        *((f"mlp.{name.rpartition('.')[2]}", shape) for name, shape in mlp.tensors[:num_matrices]),
    )
    last = (("norm", (width,)), *(() if is_tied else (("head", (width, vocab)),)))
    blocks = tuple((f"blocks.{index}.{name}", shape) for index in range(num_layers) for name, shape in block)
    scores_flops = num_layers * 4 * context * width // (2 if is_flash and is_causal else 1)
    weights = 0 if is_flash else num_heads * context
    split = 2 * width + 2 * narrow + (hidden if num_matrices == 2 else 3 * hidden)
    kept, kept_cut, recomputed = {
        "none": (4 * width, split + weights, 0.0), "selective": (width, split // 2 + width, 0.5),
        "full": (width, 0, 1.0),
    }[checkpointing]  # fmt: skip
    return Workload(
        tensors=(("embedding", (vocab, width)), *blocks, *last),
        unit_tensors=(1, *(len(block),) * num_layers, len(last)),
        summed_per_token=mlp.summed_per_token + num_layers * width,
        kept_per_token=num_layers * kept + 2 * width,
        kept_cut_per_token=num_layers * kept_cut + vocab,
        products=((2 * num_layers, width, width), (2 * num_layers, width, narrow), *mlp.products, (1, width, vocab)),
        attention=Attention(num_heads, width, context, is_flash, scores_flops),
        moved_per_token=num_layers * (13 * width + num_matrices * hidden + 4 * weights),
        moved_unfused_per_token=num_layers * (36 * width + (2 * num_matrices - 1) * hidden + 12 * weights),
        recomputed=recomputed,
    )
