"""Predicts the time of a step with buckets: the in-order pipeline of ``planning.cost.overlap`` with the real buckets.

    gradient ready   its share of the FLOPs of forward and backward in the trace, times their time
    bucket sent      o + S / w, fitted to all-reduces timed on the same ranks in the same rounds
    both at once     each slowed to a rate fitted to forward and backward timed beside all-reduces
    step             the step without communication + what the pipeline leaves over after the last gradient

Gradients are timed by FLOPs because a compiled step has no place for a clock, and the same shares serve both
frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxddp.instruments.schedule import Schedule
from jaxddp.instruments.simulate import simulate
from jaxddp.network import GB, Network
from jaxddp.planning.chips import Chip, chip_of
from jaxddp.planning.cost.bandwidth import bus_factor, fit_sweep
from jaxddp.planning.cost.contention import rate_at_once, shared_finish_s
from jaxddp.planning.cost.overlap import COMMUNICATION_BOUND, COMPUTE_BOUND, Optimum, bucket_times_s, uniform_optimum

Buckets = Sequence[Sequence[tuple[str, int]]]
GOOD_ERROR = 0.15
# Its speed is fitted, so only its ratio of FLOPs to bytes matters.
_CORE = Chip("core", ("cpu",), "a core of a CPU", "cpu", {"float32": 5e10}, "float32", 1e10, 0, 0.0, 0.0, 1, "")


class Shares(NamedTuple):
    """How the FLOPs of forward and backward are spread over the trace.

    Attributes:
        forward: Share of the forward.
        ready: Share that is done before each gradient is ready, by name.
    """

    forward: float
    ready: Mapping[str, float]


@dataclass(frozen=True)
class Costs:
    """What was measured for a framework on its ranks.

    Attributes:
        forward_backward_s: The part of the step without communication that is forward and backward.
        latency_s: o, of one all-reduce.
        bytes_per_s: w, bytes of the buffer per second.
        rate_at_once: Speed of computing and of communicating while both run, as a share of that alone.
        latency_error_s: Standard error of o.
        bytes_per_s_error: Standard error of w.
    """

    step_without_communication_s: float
    forward_backward_s: float
    latency_s: float
    bytes_per_s: float
    num_ranks: int
    rate_at_once: float = 1.0
    latency_error_s: float = 0.0
    bytes_per_s_error: float = 0.0

    @property
    def network(self) -> Network:
        """The same as a network."""
        sent_per_s = self.bytes_per_s * float(bus_factor("all_reduce", self.num_ranks))
        return Network(gb_per_s=sent_per_s / GB, latency_us=self.latency_s * 1e6)


class Prediction(NamedTuple):
    """The expected time of a step, and the part that is exposed communication."""

    step_s: float
    exposed_s: float


def fit_costs(
    step_without_communication_s: float,
    forward_backward_s: float,
    all_reduces: Mapping[int, float],
    num_ranks: int,
    at_once: tuple[float, float] | None = None,
) -> Costs:
    """Fits latency and bandwidth, and how much computing and communicating slow each other down.

    ``all_reduces`` maps bytes to the seconds of one all-reduce; ``at_once`` has the seconds of all-reduces alone, and
    of forward and backward beside them, or is None if they do not interfere.

    Raises:
        ValueError: If times do not grow with sizes.
    """
    fit = fit_sweep(list(all_reduces), list(all_reduces.values()))
    rate = rate_at_once(forward_backward_s, *at_once) if at_once else 1.0
    return Costs(
        step_without_communication_s, forward_backward_s, max(0.0, fit.latency_s), fit.bytes_per_s, num_ranks, rate,
        fit.latency_error_s, fit.bytes_per_s_error,
    )  # fmt: skip


def predict(buckets: Buckets, shares: Shares, costs: Costs) -> Prediction:
    """Computes the pipeline's step time."""
    tensors = [tensor for bucket in buckets for tensor in bucket]
    if not tensors:
        return Prediction(costs.step_without_communication_s, 0.0)
    ends = np.cumsum([len(bucket) for bucket in buckets]).tolist()
    places = [range(end - len(bucket), end) for bucket, end in zip(buckets, ends, strict=True)]
    ready_s = [shares.ready[name] * costs.forward_backward_s for name, _ in tensors]
    timed = bucket_times_s(
        places, [num_bytes for _, num_bytes in tensors], ready_s, costs.bytes_per_s, costs.latency_s
    )  # fmt: skip
    exposed_s = shared_finish_s(costs.forward_backward_s, *timed, costs.rate_at_once) - costs.forward_backward_s
    return Prediction(costs.step_without_communication_s + exposed_s, exposed_s)


def backward_s(shares: Shares, costs: Costs) -> float:
    """Seconds of the backward."""
    return (1 - shares.forward) * costs.forward_backward_s


def regime(num_bytes: int, shares: Shares, costs: Costs) -> str:
    """Whether sending all gradients in one call takes longer than computing the backward."""
    sending_s = num_bytes / costs.bytes_per_s
    return COMMUNICATION_BOUND if sending_s >= backward_s(shares, costs) else COMPUTE_BOUND


def uniform(num_bytes: int, shares: Shares, costs: Costs) -> Optimum | None:
    """The best number of equal buckets by formula; None if latency is 0, because there is no optimum."""
    if costs.latency_s == 0:
        return None
    return uniform_optimum(backward_s(shares, costs), num_bytes, costs.bytes_per_s, costs.latency_s)


def simulated(schedule: Schedule, device: str, costs: Costs) -> Prediction:
    """Simulates a compiled step on a device as fast as measured, and on the fitted network.

    Raises:
        ValueError: If the device is a GPU or TPU whose numbers are not known.
    """
    chip = _CORE if device in _CORE.device_kinds else chip_of(device)
    factor = simulate(schedule, chip, costs.network).compute_s / costs.step_without_communication_s
    fitted = replace(
        chip,
        flops_per_s={dtype: rate * factor for dtype, rate in chip.flops_per_s.items()},
        memory_bytes_per_s=chip.memory_bytes_per_s * factor,
    )
    found = simulate(schedule, fitted, costs.network)
    return Prediction(found.step_s, found.exposed_s)


def judge(predicted_s: float, measured_s: float) -> dict[str, Any]:
    """The relative error of a prediction, and a ``check``, which is ``"ok"`` within 15 %."""
    error = predicted_s / measured_s - 1
    return {"error_share": error, "check": "ok" if abs(error) <= GOOD_ERROR else f"off by {error:+.0%}"}
