"""Sizes of the decoder-only transformer of both packages' ``models``, with names for some."""

import dataclasses

from .arguments import check_integer


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a transformer; a ValueError if they do not fit together."""

    vocab: int  # token ids run from 0 to vocab - 1
    context: int  # greatest sequence length, in tokens
    width: int  # of the residual stream
    num_layers: int  # blocks
    num_heads: int  # attention heads per block
    hidden: int  # width inside the feed-forward network

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, check_integer(field.name, getattr(self, field.name)))
        if self.width % self.num_heads:
            raise ValueError(f"width (={self.width}) must be divisible by num_heads (={self.num_heads})")
        if self.head_size % 2:
            raise ValueError(f"width / num_heads (={self.head_size}) must be even: RoPE turns pairs")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    def check_length(self, length: int) -> None:
        """Refuses sequences longer than the context with a ValueError."""
        if length > self.context:
            raise ValueError(f"sequence length (={length}) must be at most context (={self.context})")

    @property
    def num_params(self) -> int:
        """Number of parameters: embedding and head ``2 V d``, blocks ``L (4 d^2 + 3 d h + 2 d)``, last norm ``d``."""
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return 2 * self.vocab * self.width + self.num_layers * block + self.width


SIZES = {
    "tiny": TransformerConfig(vocab=64, context=16, width=16, num_layers=2, num_heads=2, hidden=32),
    "byte": TransformerConfig(vocab=256, context=128, width=256, num_layers=4, num_heads=8, hidden=1024),
    "byte_shallow": TransformerConfig(vocab=256, context=128, width=256, num_layers=2, num_heads=8, hidden=1024),
    "lm_9m": TransformerConfig(vocab=10_000, context=128, width=256, num_layers=4, num_heads=8, hidden=1024),
    "seed_xl": TransformerConfig(vocab=10_000, context=128, width=768, num_layers=16, num_heads=12, hidden=3200),
    "small": TransformerConfig(vocab=10_000, context=128, width=768, num_layers=12, num_heads=12, hidden=3072),
    "medium": TransformerConfig(vocab=10_000, context=128, width=1024, num_layers=24, num_heads=16, hidden=4096),
    "large": TransformerConfig(vocab=10_000, context=128, width=1280, num_layers=36, num_heads=20, hidden=5120),
    "xl": TransformerConfig(vocab=10_000, context=128, width=1600, num_layers=48, num_heads=25, hidden=6400),
    "2.7b": TransformerConfig(vocab=10_000, context=128, width=2560, num_layers=32, num_heads=32, hidden=10_240),
}
"""Named sizes. ``tiny`` is for tests; ``byte`` reads bytes; ``seed_xl`` has 171,098,880 parameters in 147 tensors."""


def config_of(name_or_config: str | TransformerConfig) -> TransformerConfig:
    """The sizes of a name, or sizes as they are; a ValueError if there are none."""
    config = SIZES.get(name_or_config) if isinstance(name_or_config, str) else name_or_config
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"unknown model {name_or_config!r}: one of {', '.join(SIZES)}")
    return config
