"""Closed forms of the sources of the figures, as oracles: how many ranks a batch keeps compute-bound, and counts.

With the letters of ``scaling.py`` and X Y = N, a step of B tokens is compute-bound if

    a X + b B Y <= c B        a = m e P / W_X,  b = 2 t e A / W_Y,  c = m f / C       times added, r(n) = 1
    a X <= c B and b Y <= c                                                         axes overlapped

for m forwards of matrix products and gathers and t of tensor-parallel reductions. At given N the sum is least where its
terms are equal, X* = sqrt(b B N / a), with B / N >= 4 a b / c^2 (a b / c^2 overlapped). With r(n) = (n-1)/n, X becomes
X-1 and Y becomes Y-1, and the most ranks that B tokens keep busy are, while both are at least 1,

    added        K = c B + a + b B,   X = K / (2 a),   Y = K / (2 b B),   N = K^2 / (4 a b B)
    overlapped   X = 1 + c B / a,     Y = 1 + c / b,   N = X Y
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..scaling import DEFAULT, Assumptions, DeviceRates, Split
from ..workload import Workload


def most_fsdp_ranks(workload: Workload, rates: DeviceRates, tokens: Any, assumptions: Assumptions = DEFAULT) -> Any:
    """1 + c B / a: the most ranks that can share parameters; the same for the backward of DP."""
    a, _, c = _coefficients(workload, rates, assumptions)
    return assumptions.ring_factors + c * np.asarray(tokens, float) / a


def most_tp_ranks(workload: Workload, rates: DeviceRates, assumptions: Assumptions = DEFAULT) -> float:
    """1 + c / b: the most ranks that can split matrices, for any batch."""
    _, b, c = _coefficients(workload, rates, assumptions)
    return assumptions.ring_factors + c / b


def most_ranks(workload: Workload, rates: DeviceRates, tokens: Any, assumptions: Assumptions = DEFAULT) -> Split:
    """The most ranks in both dimensions, not rounded."""
    a, b, c = _coefficients(workload, rates, assumptions)
    batch = np.asarray(tokens, float)
    if assumptions.overlapped_axes:
        return Split(assumptions.ring_factors + c * batch / a, assumptions.ring_factors + c / b, batch)
    k = c * batch + (a + b * batch if assumptions.ring_factors else 0)
    return Split(k / (2 * a), k / (2 * b * batch), batch)


def continuous_split(
    workload: Workload, rates: DeviceRates, num_devices: Any, tokens: Any = None, assumptions: Assumptions = DEFAULT
) -> Split:
    """The split that communicates least, not rounded; ``tokens`` defaults to the smallest compute-bound batch."""
    a, b, c = _coefficients(workload, rates, assumptions)
    n = np.asarray(num_devices, float)
    if tokens is None:
        tokens = n * a * b / c**2 * (1 if assumptions.overlapped_axes else 4)
    fsdp = np.sqrt(b * np.asarray(tokens, float) * n / a)
    return Split(fsdp, n / fsdp, np.asarray(tokens, float))


def _coefficients(workload: Workload, rates: DeviceRates, assumptions: Assumptions) -> tuple[float, float, float]:
    m, t, e = assumptions.multiples.compute, assumptions.multiples.tp, assumptions.element_bytes
    return (
        m * e * workload.num_params / rates.fsdp_bytes_per_s,
        2 * t * e * workload.summed_per_token / rates.tp_bytes_per_s,
        m * workload.flops_per_token / rates.flops_per_s,
    )


def num_gathers(num_layers: Any, num_microbatches: Any = 1, *, keep_last: bool = True, keep_first: bool = False) -> Any:
    """Layers that zero3 gathers in one step of A micro-batches: A (2 L - 1), or 2 A (L - 1) + 1 with ``keep_first``.

    ``keep_last`` keeps the last layer between its forward and backward, ``keep_first`` the first one between the
    backward of a micro-batch and the forward of the next.
    """
    layers, batches = np.asarray(num_layers), np.asarray(num_microbatches)
    return 2 * batches * layers - batches * keep_last - (batches - 1) * keep_first


def counted_bytes(kind: str, rank_bytes: int, num_ranks: int) -> int:
    """S as nccl-tests counts it, from the bytes of the smaller of a rank's two buffers."""
    per_rank = ("reduce_scatter", "all_gather", "alltoall", "gather", "scatter")
    return rank_bytes * (num_ranks if kind in per_rank else num_ranks - 1 if kind == "hypercube" else 1)
