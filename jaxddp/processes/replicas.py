"""The error of both packages if ranks hold different values of what should be the same. No framework is imported."""

from collections.abc import Sequence


class ReplicaError(RuntimeError):
    """Ranks hold different values of what should be the same."""


def replicas_differ(name: str, ranks: Sequence[int], num_more: int, step: int) -> ReplicaError:
    """The error about a tensor, the ranks that do not hold what most do, and how many more tensors differ."""
    listed = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    more = f", as do {num_more} more" * (num_more > 0)
    return ReplicaError(
        f"{name} of rank{'s' * (len(ranks) > 1)} {listed} differs from what most ranks hold after step {step}{more}: "
        "a device or its memory may be faulty"
    )
