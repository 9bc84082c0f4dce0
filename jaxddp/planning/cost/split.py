"""How many devices a batch keeps busy, and how best to split them between FSDP and tensor parallelism.

With the letters of ``scaling.py``, and X Y = N, a step is compute-bound if

    a X + b B Y <= c B        a = m e P / W_X,  b = 2 t e A / W_Y,  c = m f / C       times added, r(n) = 1
    a X <= c B and b Y <= c                                                         axes overlapped

for m forwards of matrix products and gatherings and t of tensor-parallel sums. The sum is least, at given N, where its
terms are equal; so

    X* = sqrt(b B N / a)        B / N >= 4 a b / c^2        overlapped  B / N >= a b / c^2
    feed-forward, k = 2, e = 2, forward:   X* = sqrt(B/F M_X/M_Y N),   B / N >= 4 alpha^2 / (M_X M_Y F),   a fourth

With r(n) = (n-1)/n every X becomes X-1 and every Y becomes Y-1 (the 1/N is common to all terms), and the most devices
that B tokens keep busy are

    added        K = c B + a + b B,   X = K / (2 a),   Y = K / (2 b B),   N = K^2 / (4 a b B)
    overlapped   X = 1 + c B / a,     Y = 1 + c / b,   N = X Y,           four times as many where they are large

While both factors are at least 1: else the smaller is 1 and the other alone decides.

References:
    As ``scaling.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .checks import check_count, check_positive
from .scaling import DEFAULT, Assumptions, Machine, min_tokens
from .workload import Workload


class Split(NamedTuple):
    """A way to use devices.

    Attributes:
        fsdp: X, not rounded in the continuous optimum.
        tp: Y.
        tokens: The batch: given, or the least that keeps them busy.
    """

    fsdp: Any
    tp: Any
    tokens: Any


def most_fsdp_ranks(workload: Workload, machine: Machine, tokens: Any, assumptions: Assumptions = DEFAULT) -> Any:
    """Gives the most ranks over which parameters can be sharded: 1 + c B / a. Of DP's backward it is the same.

    Args:
        workload: The model.
        machine: The device.
        tokens: B, of all ranks together; a number or an array.
        assumptions: What is taken for granted.

    Returns:
        X, not rounded.

    Raises:
        ValueError: If a number is out of range.
    """
    check_positive(tokens=tokens)
    a, _, c = _coefficients(workload, machine, assumptions)
    return assumptions.ring_factors + c * np.asarray(tokens, float) / a


def most_tp_ranks(workload: Workload, machine: Machine, assumptions: Assumptions = DEFAULT) -> float:
    """Gives the most ranks over which matrices can be cut, whatever the batch: 1 + c / b.

    Args:
        workload: The model.
        machine: The device.
        assumptions: What is taken for granted.

    Returns:
        Y, not rounded.

    Raises:
        ValueError: If a number is out of range.
    """
    _, b, c = _coefficients(workload, machine, assumptions)
    return assumptions.ring_factors + c / b


def most_ranks(workload: Workload, machine: Machine, tokens: Any, assumptions: Assumptions = DEFAULT) -> Split:
    """Gives the most ranks that a batch keeps busy, FSDP and tensor parallelism together.

    Args:
        workload: The model.
        machine: The device.
        tokens: B; a number or an array.
        assumptions: What is taken for granted.

    Returns:
        X and Y, whose product they are; not rounded. Right where both are at least 1.

    Raises:
        ValueError: If a number is out of range.
    """
    check_positive(tokens=tokens)
    a, b, c = _coefficients(workload, machine, assumptions)
    batch = np.asarray(tokens, float)
    if assumptions.overlapped_axes:
        return Split(assumptions.ring_factors + c * batch / a, assumptions.ring_factors + c / b, batch)
    k = c * batch + assumptions.ring_factors * (a + b * batch)
    return Split(k / (2 * a), k / (2 * b * batch), batch)


def continuous_split(
    workload: Workload, machine: Machine, num_devices: Any, tokens: Any = None, assumptions: Assumptions = DEFAULT
) -> Split:
    """Gives the split that communicates least, axes not overlapped and r(n) = 1: X* = sqrt(b B N / a).

    Args:
        workload: The model.
        machine: The device.
        num_devices: N; a number or an array.
        tokens: B; when None the least that keeps N devices busy at that split: 4 a b / c^2 each, or a fourth of it
            where axes overlap.
        assumptions: What is taken for granted.

    Returns:
        X, Y and B, not rounded.

    Raises:
        ValueError: If a number is out of range.
    """
    check_count(num_devices=num_devices)
    a, b, c = _coefficients(workload, machine, assumptions)
    n = np.asarray(num_devices, float)
    if tokens is None:
        tokens = n * a * b / c**2 * (1 if assumptions.overlapped_axes else 4)
    check_positive(tokens=tokens)
    fsdp = np.sqrt(b * np.asarray(tokens, float) * n / a)
    return Split(fsdp, n / fsdp, np.asarray(tokens, float))


def best_split(
    workload: Workload,
    machine: Callable[[int, int], Machine],
    num_devices: int,
    assumptions: Assumptions = DEFAULT,
) -> Split:
    """Tries every split of N devices for the one that needs the smallest batch.

    Args:
        workload: The model.
        machine: ``(X, Y) ->`` the device, whose links may serve one split better than another.
        num_devices: N.
        assumptions: What is taken for granted.

    Returns:
        The best split and the batch it needs, not rounded. There is one: FSDP alone has a batch that is large enough.

    Raises:
        ValueError: If a number is out of range.
    """
    check_count(num_devices=num_devices)
    small = [divisor for divisor in range(1, math.isqrt(num_devices) + 1) if num_devices % divisor == 0]
    found = []
    for tp in sorted({*small, *(num_devices // divisor for divisor in small)}):
        fsdp = num_devices // tp
        found.append(Split(fsdp, tp, float(min_tokens(workload, machine(fsdp, tp), fsdp, tp, 1, assumptions))))
    return min(found, key=lambda split: split.tokens)


def _coefficients(workload: Workload, machine: Machine, assumptions: Assumptions) -> tuple[float, float, float]:
    """Gives a, b and c."""
    m, t, e = assumptions.multiples.compute, assumptions.multiples.tp, assumptions.element_bytes
    return (
        m * e * workload.num_params / machine.fsdp_bytes_per_s,
        2 * t * e * workload.summed_per_token / machine.tp_bytes_per_s,
        m * workload.flops_per_token / machine.flops_per_s,
    )
