"""Which rank owns each whole parameter, where optimizer state is not cut. Both packages use this file.

The largest comes first, and each goes to the rank that has least so far (Graham's rule). The fullest rank has at most
1/N of everything plus the largest parameter.

References:
    Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 1969.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_owners(costs: Sequence[tuple[int, ...]], loads: Sequence[tuple[int, ...]]) -> list[int]:
    """Assigns parameters to ranks.

    Args:
        costs: Of each parameter, such as its bytes. Of several numbers the first is balanced; the others decide ties.
        loads: What each rank has already, in the same numbers.

    Returns:
        The rank of each parameter.

    Example:
        >>> assign_owners([(3,), (5,), (4,), (2,)], [(0,), (0,)])
        [1, 0, 1, 0]
    """
    totals, owners = list(loads), [0] * len(costs)
    for place in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # stable: equal ones keep their order
        owner = min(range(len(totals)), key=totals.__getitem__)
        owners[place] = owner
        totals[owner] = tuple(map(sum, zip(totals[owner], costs[place], strict=True)))
    return owners
