"""Bucket caps for a network: ``tune_buckets`` resolves ``bucketed("auto", network=...)``.

Small buckets pay the network's latency more often. Large ones start later, need a copy into a buffer, and leave more
communication after the backward. So the choice is made by simulation: the step is compiled once without communication,
which gives the time of each gradient; the schedule of each candidate is written down from its plan and simulated.

    compute:        forward | backward up to bucket 0 | pack 0 | ... | pack n | update 0 | update 1 | ... | update n
    communication:                                             bucket 0 | bucket 1 | ...       (update k waits for k)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arguments import check_kind
from ..communication.buckets import DEFAULT_BUCKET_MB, BucketMb, BucketPlan, Rule, TensorSpec, plan_buckets
from ..ddp.bucketed import Untuned, bucketed
from ..network import Network
from ..planning.chips import Chip
from ..training.train import Trainer, TrainState
from .schedule import Collective, Operation, Schedule, read_schedule
from .simulate import device_seconds, simulate
from .targets import start_compile_without_communication, target_like
from .work import Work

# Above 64 MiB schedules differ from the one above: XLA splits copies of many tensors and reorders buckets.
_CAPS_MB = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64)
# What a candidate must gain to replace the usual 25 MiB: more than the error of the written schedule (0.4 %).
_LEAST_GAIN = 0.005


def tune_buckets(trainer: Trainer, params_or_state: Any, batch: Any) -> Trainer:
    """Chooses the caps of ``bucketed("auto", network=...)``.

    The trainer's mesh is of a target, or of devices of a known chip; arrays may be ``jax.ShapeDtypeStruct``.

    Raises:
        ValueError: If the strategy is another, or the devices are of no known chip.
    """
    check_kind("trainer", trainer, Trainer, "a Trainer")
    strategy, untuned = trainer.strategy, trainer.strategy.plan
    if not isinstance(untuned, Untuned):
        raise ValueError(f"strategy (={strategy.name!r}) must be bucketed('auto', network=...) to be tuned")
    chip = target_like(trainer.mesh).chip
    is_state = isinstance(params_or_state, TrainState)
    state = params_or_state if is_state else trainer.abstract_state(params_or_state)
    schedule = read_schedule(start_compile_without_communication(trainer, state, batch).result())
    trace = trainer.trace(state, batch)
    timing = time_gradients(schedule, trace.tensors, trace.flops_before, chip, trainer.num_ranks)
    caps = best_caps(timing, untuned.network, untuned.rule)
    return trainer.with_strategy(bucketed(caps, rule=untuned.rule, hook=strategy.hook))


@dataclass(frozen=True)
class StepTiming:
    """When one rank's step, without communication, has its gradients.

    Attributes:
        tensors: In the order in which their gradients are ready.
        ready_s: Seconds from the step's start to each.
        backward_end_s: When the backward ends.
        optimizer_s: Seconds of the updates after that.
    """

    tensors: tuple[TensorSpec, ...]
    ready_s: tuple[float, ...]
    backward_end_s: float
    optimizer_s: float
    chip: Chip
    num_ranks: int


def time_gradients(
    schedule: Schedule, tensors: Sequence[TensorSpec], flops_before: Sequence[float], chip: Chip, num_ranks: int
) -> StepTiming:
    """Reads the times of gradients from a step compiled without communication.

    ``flops_before`` is the share of forward and backward FLOPs that the trace has before each gradient.
    """
    before_update = [op for op in schedule.operations if op.phase != "optimizer"]
    seconds = np.cumsum([0.0] + [device_seconds(op.total_work, chip) for op in before_update])
    flops = np.cumsum([0.0] + [sum(op.total_work.matmul_flops.values()) for op in before_update])
    # Among successive operations without matrix products, a gradient is ready after the first.
    places = np.searchsorted(flops, np.asarray(flops_before) * flops[-1] * (1 - 1e-9))
    total = sum(device_seconds(op.total_work, chip) for op in schedule.operations)
    return StepTiming(
        tuple(tensors), tuple(float(seconds[place]) for place in places), float(seconds[-1]),
        total - float(seconds[-1]), chip, num_ranks,
    )  # fmt: skip


def expected_step_s(plan: BucketPlan, timing: StepTiming, network: Network) -> float:
    """Simulates the schedule that a plan compiles to."""

    def takes(seconds: float) -> Work:
        return Work(num_bytes=seconds * timing.chip.memory_bytes_per_s)

    ready = {tensor.name: when for tensor, when in zip(timing.tensors, timing.ready_s, strict=True)}
    group = tuple(range(timing.num_ranks))
    operations, done_s = [], 0.0
    for index, bucket in enumerate(plan.buckets):
        full_s = max(done_s, max(ready[tensor.name] for tensor in bucket.tensors))
        copied = 2.0 * bucket.num_bytes if len(bucket.tensors) > 1 else 0.0
        operations.append(Operation(f"backward.{index}", "backward", takes(full_s - done_s) + Work(num_bytes=copied)))
        all_reduce = Collective("all-reduce", bucket.num_bytes, group, is_async=True)
        operations.append(Operation(f"start.{index}", starts=all_reduce))
        done_s = full_s
    operations.append(Operation("backward", "backward", takes(max(0.0, timing.backward_end_s - done_s))))
    for index, bucket in enumerate(plan.buckets):
        operations.append(Operation(f"done.{index}", waits_for=f"start.{index}"))
        share = bucket.num_bytes / plan.num_bytes
        operations.append(Operation(f"update.{index}", "optimizer", takes(timing.optimizer_s * share)))
    return simulate(Schedule(tuple(operations)), timing.chip, network).step_s


def best_caps(timing: StepTiming, network: Network, rule: Rule = "before") -> BucketMb:
    """Picks the caps in MiB with the least expected step time; 25 unless others are clearly better."""
    usual: BucketMb = DEFAULT_BUCKET_MB
    candidates: list[BucketMb] = [*_CAPS_MB, *([first, cap] for cap in _CAPS_MB for first in _CAPS_MB if first < cap)]
    expected: dict[tuple[tuple[int, ...], ...], tuple[float, BucketMb]] = {}
    for candidate in candidates:
        plan = plan_buckets(timing.tensors, candidate, rule=rule)
        key = tuple(tuple(tensor.num_bytes for tensor in bucket.tensors) for bucket in plan.buckets)
        if key not in expected:
            expected[key] = (expected_step_s(plan, timing, network), candidate)
    usual_s = expected_step_s(plan_buckets(timing.tensors, usual, rule=rule), timing, network)
    best_s, best = min(expected.values(), key=lambda entry: entry[0])
    return best if best_s < usual_s * (1 - _LEAST_GAIN) else usual
