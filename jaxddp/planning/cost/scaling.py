"""When a step is compute-bound: compute takes at least as long as the communication that overlaps it.

N = X Y R devices: X ranks share the parameters of a replica and gather them (FSDP), Y split each matrix (TP), R
replicas reduce their gradients (DP). A step has B tokens. The model has P parameters of e bytes each, f FLOPs per token
of a forward, and A elements per token that tensor parallelism all-reduces. A device computes C FLOP/s and sends W_X,
W_Y, W_R bytes per second to its FSDP, TP and DP groups. r(n) is (n-1)/n, the share of a ring's bytes that leaves a
rank, or 1 where that is neglected.

                     forward                          backward                         both
    compute          f B / (N C)                      2 x                              3 x
    FSDP             e P r(X) / (Y W_X), gather       2 x: gather, reduce-scatter      3 x
    TP               2 e A B r(Y) / (X R W_Y)         the same                         2 x
    DP               0                                2 e P r(R) / (X Y W_R)           the same

For the feed-forward model of k matrices f = 2 k D F L, P = k D F L and A = D L, so D and L cancel. With e = 2:

    k = 3, r(n) = (n-1)/n, one W, on GPUs             k = 2, r(n) = 1, W per axis of a torus, M axes a group, on TPUs
    DP, FSDP   N <= 1 + B W/C                         B / X >= alpha / M_X,  alpha = C / W
    TP         N <= 1 + 1.5 F W/C, backward 3 F W/C   Y <= M_Y F / alpha

A torus axis of a TPU sends in both directions of its ring, so W is twice the one-way rate of a link: 2 x 9e10 B/s for
v5p. FSDP and TP communicate over different axes: their times add, or the longer one counts if they overlap. Added,

    F / (Y M_X) + B / (X M_Y) <= B F / (N alpha)      so      B >= [F / (Y M_X)] / [F / (N alpha) - 1 / (X M_Y)]

If the bracket is not positive, no batch is large enough: TP time grows with B as compute does. Accumulating K
micro-batches of b tokens does not lower that B: gradients reduced once need K b >= B, and FSDP, which gathers
parameters in every micro-batch, needs b >= B.

References:
    Austin et al., How to Scale Your Model, 2025 (training, on TPUs): https://jax-ml.github.io/scaling-book/training
    Stanford CS336 (2026), assignment 2, section 8 (GPUs); (2025), communication_accounting (TPUs).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from .checks import check_choice, check_count, check_not_negative, check_positive
from .workload import Workload

Passes = Literal["forward", "backward", "both"]


class _Multiples(NamedTuple):
    compute: int
    fsdp: int
    tp: int
    dp: int


_MULTIPLES = {
    "forward": _Multiples(1, 1, 1, 0),
    "backward": _Multiples(2, 2, 1, 1),
    "both": _Multiples(3, 3, 2, 1),
}


@dataclass(frozen=True)
class DeviceRates:
    """What a device does per second.

    Attributes:
        flops_per_s: C.
        fsdp_bytes_per_s: W_X; M_X W on a torus.
        tp_bytes_per_s: W_Y; M_Y W on a torus.
        dp_bytes_per_s: W_R; that of FSDP when None.
    """

    flops_per_s: float
    fsdp_bytes_per_s: float
    tp_bytes_per_s: float
    dp_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_positive(**{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the compute-bound conditions.

    Attributes:
        passes: ``"forward"``, ``"backward"`` or ``"both"``.
        overlapped_axes: Whether collectives of FSDP, TP and DP run at the same time.
        ring_factors: Whether r(n) is (n-1)/n instead of 1.
        element_bytes: e.

    Raises:
        ValueError: If ``passes`` is unknown or ``element_bytes`` not positive.
    """

    passes: Passes = "forward"
    overlapped_axes: bool = False
    ring_factors: bool = False
    element_bytes: float = 2

    def __post_init__(self) -> None:
        check_choice(_MULTIPLES, passes=self.passes)
        check_positive(element_bytes=self.element_bytes)

    @property
    def multiples(self) -> _Multiples:
        """Each kind of work as a multiple of one forward's."""
        return _MULTIPLES[self.passes]

    def ring(self, num_ranks: Any) -> Any:
        """r(n); 0 for a group of one, which sends nothing."""
        n = np.asarray(num_ranks, float)
        return (n - 1) / n if self.ring_factors else np.where(n > 1, 1.0, 0.0)


class Times(NamedTuple):
    """Seconds of each kind of work.

    Attributes:
        compute_s: Matrix products.
        fsdp_s: Gathering parameters and reduce-scattering gradients.
        tp_s: Reducing activations.
        dp_s: Reducing gradients over replicas.
    """

    compute_s: Any
    fsdp_s: Any
    tp_s: Any
    dp_s: Any

    def communication_s(self, assumptions: Assumptions) -> Any:
        """Seconds of all communication: the longest kind if they overlap, otherwise the sum."""
        kinds = (self.fsdp_s, self.tp_s, self.dp_s)
        return np.maximum.reduce(np.broadcast_arrays(*kinds)) if assumptions.overlapped_axes else sum(kinds)


DEFAULT = Assumptions()


def times(
    workload: Workload,
    rates: DeviceRates,
    tokens: Any,
    fsdp: Any,
    tp: Any,
    dp: Any = 1,
    assumptions: Assumptions = DEFAULT,
) -> Times:
    """Computes the times of the table above.

    ``tokens`` is B, over all devices, ``fsdp`` X, ``tp`` Y and ``dp`` R; each may be an array.
    """
    check_not_negative(tokens=tokens)
    check_count(fsdp=fsdp, tp=tp, dp=dp)
    x, y, r = (np.asarray(ranks, float) for ranks in (fsdp, tp, dp))
    size_bytes = assumptions.element_bytes * workload.num_params
    summed_bytes = assumptions.element_bytes * workload.summed_per_token * np.asarray(tokens, float)
    dp_bytes_per_s = rates.dp_bytes_per_s or rates.fsdp_bytes_per_s
    times = assumptions.multiples
    return Times(
        times.compute * workload.flops_per_token * np.asarray(tokens, float) / (x * y * r * rates.flops_per_s),
        times.fsdp * size_bytes * assumptions.ring(x) / (y * rates.fsdp_bytes_per_s),
        times.tp * 2 * summed_bytes * assumptions.ring(y) / (x * r * rates.tp_bytes_per_s),
        times.dp * 2 * size_bytes * assumptions.ring(r) / (x * y * dp_bytes_per_s),
    )


def min_tokens(
    workload: Workload, rates: DeviceRates, fsdp: Any, tp: Any, dp: Any = 1, assumptions: Assumptions = DEFAULT
) -> Any:
    """Computes the smallest compute-bound batch; the arguments are those of ``times``.

    B is over all devices and not rounded; inf if no batch is large enough.

    Example:
        >>> from .workload import feed_forward
        >>> v5p = DeviceRates(flops_per_s=4.6e14, fsdp_bytes_per_s=2 * 1.8e11, tp_bytes_per_s=1.8e11)
        >>> round(float(min_tokens(feed_forward(16384, 53248), v5p, fsdp=16, tp=4)), 1)
        25301.7
    """
    one = times(workload, rates, 1, fsdp, tp, dp, assumptions)  # one token: splits what grows with B from what does not
    fixed_s = one._replace(tp_s=0.0).communication_s(assumptions)
    room_s = one.compute_s - (0.0 if assumptions.overlapped_axes else one.tp_s)
    possible = one.compute_s >= one.tp_s if assumptions.overlapped_axes else room_s > 0
    return np.where(possible, fixed_s / np.where(possible, room_s, 1.0), np.inf)


def accumulated_min_tokens(min_tokens: Any, num_microbatches: Any, *, gathers_every: bool) -> Any:
    """Computes the smallest compute-bound batch of a step of K micro-batches.

    ``min_tokens`` is that of one micro-batch. With ``gathers_every`` each one communicates, as under FSDP.
    """
    check_count(num_microbatches=num_microbatches)
    return np.multiply(min_tokens, num_microbatches if gathers_every else 1)


class Split(NamedTuple):
    """A split of devices into FSDP and tensor parallelism.

    Attributes:
        fsdp: X.
        tp: Y.
        tokens: The smallest compute-bound batch.
    """

    fsdp: Any
    tp: Any
    tokens: Any


def best_split(
    workload: Workload,
    rates: Callable[[int, int], DeviceRates],
    num_devices: int,
    assumptions: Assumptions = DEFAULT,
) -> Split:
    """Finds the split X Y = N with the smallest compute-bound batch. FSDP alone always has one.

    ``rates`` maps ``(X, Y)`` to the device, whose links may serve one split better than another.
    """
    check_count(num_devices=num_devices)
    small = [divisor for divisor in range(1, math.isqrt(num_devices) + 1) if num_devices % divisor == 0]
    found = []
    for tp in sorted({*small, *(num_devices // divisor for divisor in small)}):
        fsdp = num_devices // tp
        found.append(Split(fsdp, tp, float(min_tokens(workload, rates(fsdp, tp), fsdp, tp, 1, assumptions))))
    return min(found, key=lambda split: split.tokens)
