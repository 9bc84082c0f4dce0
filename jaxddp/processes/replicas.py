"""Ranks that hold different values of what should be the same: the error of both packages. No framework is imported."""

from __future__ import annotations

from collections.abc import Sequence


class ReplicasDifferError(RuntimeError):
    """Ranks hold different values of what should be the same."""


def describe_difference(name: str, ranks: Sequence[int], num_more: int, kind: str, difference: float, step: int) -> str:
    """One line about what differs: ``name``, by up to ``difference``, on ``ranks``; and ``num_more`` of that kind."""
    of_ranks = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
    more = f", as do {num_more} more {kind}" * (num_more > 0)
    return (
        f"{name} of {of_ranks} differs by up to {difference:.3g} from what most ranks hold after step {step}{more}:"
        " a device or its memory may be faulty"
    )
