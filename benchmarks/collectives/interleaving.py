"""Times the collectives of one size in interleaved rounds on the ranks of one backend.

Every round calls each collective once and starts with a different one. All ranks meet at a barrier before a call, and
the time of a call is that of its slowest rank. The results of a size are reported before the next size starts, so a
later crash does not lose them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from jaxddp.environment import cuda_libraries
from jaxddp.training.clock import stopwatch
from torchref.launch import report

from ..harness.exchange import gather
from ..training.interleaving import Attempts, agree_over_ranks

MIN_ROUNDS, MAX_ROUNDS = 5, 100
MOST_IN_A_ROW_BYTES = 2**20  # larger calls take so long that what surrounds them does not count
REPORT_EVERY_S = 10.0  # shows that a slow size makes progress, without disturbing the timing
NUM_WARMUP = 2  # one to check a collective, one to decide on the number of rounds


class Batch(NamedTuple):
    """The collectives of one size: the requested bytes, and their names."""

    asked_bytes: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class RanksJob:
    """The work of one backend's ranks; plain data, sent to their processes.

    Attributes:
        batches: Largest first, because memory freed by large buffers serves smaller ones.
        num_rounds: Timed rounds per size; None for as many as fit into ``budget_s`` seconds.
        in_a_row: Calls of small buffers that are also timed between two synchronisations; 0 for none.
    """

    batches: tuple[Batch, ...]
    num_rounds: int | None
    budget_s: float
    in_a_row: int = 0


@dataclass
class Timed:
    """What one process found for one collective at one size.

    Attributes:
        size_bytes: Bytes of the full buffer.
        planned: ``(kind, bytes)`` of the collectives that it should issue.
        found: Those of the compiled program or, where nothing is compiled, those issued.
        kernel: The compiler's name of the implementation; None if there is none.
        wrong: Number of wrong values in all results.
        in_a_row: Seconds of one call of many in a row, by round.
        failed: Why it could not be called; empty if it could.
    """

    name: str
    asked_bytes: int
    size_bytes: int = 0
    planned: list[tuple[str, int]] = field(default_factory=list)
    found: list[tuple[str, int]] = field(default_factory=list)
    kernel: str | None = None
    wrong: int = 0
    seconds: list[float] = field(default_factory=list)
    in_a_row: list[float] = field(default_factory=list)
    failed: str = ""


class Side(NamedTuple):
    """The ranks' device, and the versions of the framework's packages."""

    device: str
    versions: dict[str, str]


class Found(NamedTuple):
    """The results of a batch: rank 0's side, and by process what it found for each collective."""

    batch: Batch
    side: Side
    timed: list[list[Timed]]


class Call(NamedTuple):
    """A collective that is ready to be called: ``prepare`` makes its input, untimed; ``timed`` takes findings."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    num_wrong: Callable[[Any], int]
    timed: Timed

    def try_out(self) -> None:
        """Calls it once, and counts wrong values."""
        self.timed.wrong += self.num_wrong(self.run(self.prepare()))


def measure(
    job: RanksJob, side: Side, ready: Callable[[Batch], Callable[[str], Call]], wait: Callable[[Any], Any]
) -> None:
    """Measures all batches on every rank, and reports each before it starts and when it is done.

    ``ready`` makes the inputs of a batch and returns a function that makes a collective's call; ``wait`` blocks until a
    value is computed.
    """
    for batch in job.batches:
        report(("size", batch))
        timed = _measure(job, batch, ready(batch), wait)
        libraries = cuda_libraries() if side.device != "cpu" else {}
        used = side._replace(versions=side.versions | libraries)
        report(("found", Found(batch, used, gather(timed))))


def rounds_within(budget_s: float, round_s: float) -> int:
    """The number of rounds that fit into a time.

    Example:
        >>> rounds_within(2.0, 0.1), rounds_within(2.0, 60.0), rounds_within(2.0, 1e-4)
        (20, 5, 100)
    """
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_s / round_s)))


class _Progress:
    """Reports the number of rounds done from time to time; ranks that are silent for long count as hung."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, num_done: int, num_rounds: int) -> None:
        if (now_s := time.monotonic()) - self._said_s >= REPORT_EVERY_S:
            self._said_s = now_s
            report(("rounds", num_done, num_rounds))


def _measure(job: RanksJob, batch: Batch, make: Callable[[str], Call], wait: Callable[[Any], Any]) -> list[Timed]:
    attempts, progress = Attempts(agree_over_ranks), _Progress()
    for name in batch.names:
        attempts(name, lambda name=name: make(name))  # type: ignore[misc]
        progress(0, 0)
    calls = list(attempts.made.values())
    if calls:
        _interleave(calls, job, wait, progress)
    failed = [Timed(name, batch.asked_bytes, failed=why) for name, why in attempts.failed.items()]
    return [call.timed for call in calls] + failed


def _interleave(calls: Sequence[Call], job: RanksJob, wait: Callable[[Any], Any], progress: _Progress) -> None:
    round_s = 0.0
    for call in calls:
        round_s += _call(call, wait)
        progress(0, 0)
    # Rank 0's time: all ranks must take the same number of rounds.
    num_rounds = job.num_rounds or rounds_within(job.budget_s, gather(round_s)[0])
    for index in range(num_rounds):
        turn = index % len(calls)
        for call in [*calls[turn:], *calls[:turn]]:
            call.timed.seconds.append(_call(call, wait))
            progress(index, num_rounds)
    for call in calls if job.in_a_row and calls[0].timed.asked_bytes <= MOST_IN_A_ROW_BYTES else ():
        for index in range(1 + MIN_ROUNDS):
            seconds = _call_in_a_row(call, job.in_a_row, wait)
            call.timed.in_a_row += [seconds] if index else []  # the first warms up
        progress(0, 0)


def _call_in_a_row(call: Call, times: int, wait: Callable[[Any], Any]) -> float:
    """Seconds of one of several calls; those in place take the result of the one before, so nothing is checked."""
    given = call.prepare()
    wait(given)
    dist.barrier()
    _, seconds = stopwatch(lambda: [call.run(given) for _ in range(times)][-1], wait=wait)
    return seconds / times


def _call(call: Call, wait: Callable[[Any], Any]) -> float:
    given = call.prepare()
    wait(given)
    dist.barrier()
    result, seconds = stopwatch(call.run, given, wait=wait)
    call.timed.wrong += call.num_wrong(result)  # of every call: XLA's Gloo is sometimes wrong
    return seconds
