"""A parameter of which a rank holds a part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from ..sharding import Cut


@dataclass(frozen=True)
class Shard:
    """A parameter of which this rank has a shard, or a row or some of it.

    Attributes:
        local: This rank's, ``[rows, c]``, or ``[c]`` of a parameter that is not cut by row.
        cut: How the whole is cut.
        dtype: Of the whole.
        is_trained: Whether it has a gradient.
    """

    local: jax.Array
    cut: Cut
    dtype: Any
    is_trained: bool = True

    def of(self, local: jax.Array) -> Shard:
        """The same of another array of its shape."""
        return replace(self, local=local)

    def rows(self, local: jax.Array, shape: tuple[int, ...]) -> Shard:
        """The shard of some of its rows, which have a given shape when whole; of one row if that has one dim."""
        return replace(self, local=local, cut=Cut(shape, self.cut.num_ranks, by_row=local.ndim == 2))
