"""How the collectives of one size take turns on the ranks of one backend, and what is noted of each.

Every round calls each collective once and begins with another of them. All ranks meet at a barrier before a call; each
notes how long its own call took, and a call took as long as on the rank that was slowest. What was found of a size is
told before the next one begins, so that it is known whatever becomes of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from jaxddp.training.clock import stopwatch
from torchref.launch import report

from ..training.interleaving import Attempts, agree_over_ranks

MIN_ROUNDS, MAX_ROUNDS = 5, 100
REPORT_EVERY_S = 10.0  # often enough to show that a slow size goes on, too seldom to disturb what is timed
NUM_WARMUP = 2  # one call to try a collective out, one that says how many rounds there is time for


class Batch(NamedTuple):
    """The collectives of one size: the bytes that were asked for, and their names."""

    asked_bytes: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class RanksJob:
    """The work of the ranks of one backend; plain data, sent to their processes.

    Attributes:
        batches: By size, largest first: what is freed then serves the smaller ones.
        num_rounds: Timed rounds of each size; None for as many as there is time for.
        budget_s: The time that there is for a size.
    """

    batches: tuple[Batch, ...]
    num_rounds: int | None
    budget_s: float


@dataclass
class Timed:
    """What one process found of one collective at one size.

    Attributes:
        size_bytes: Of the full buffer.
        planned: ``(kind, bytes)`` of what it should issue.
        found: The same of what it does: read from the compiled program, or as issued where nothing is compiled.
        kernel: The compiler's name for how it is carried out; None if it gives none.
        wrong: Values that were wrong, of all results.
        seconds: By round.
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
    failed: str = ""


class Side(NamedTuple):
    """What the ranks run on, and with which versions of the framework's packages."""

    device: str
    versions: dict[str, str]


class Found(NamedTuple):
    """What was found of a size: by rank 0's side, and what each process noted of each collective."""

    batch: Batch
    side: Side
    timed: list[list[Timed]]


class Call(NamedTuple):
    """A collective that is ready to be called.

    Attributes:
        prepare: Gives its input, untimed.
        run: Makes its result of the input.
        num_wrong: Counts the wrong values of a result.
        timed: Where to note what is found.
    """

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    num_wrong: Callable[[Any], int]
    timed: Timed

    def try_out(self) -> None:
        """Calls it, and notes wrong values."""
        self.timed.wrong += self.num_wrong(self.run(self.prepare()))


def measure(
    job: RanksJob, side: Side, ready: Callable[[Batch], Callable[[str], Call]], wait: Callable[[Any], Any]
) -> None:
    """Measures everything; every rank does the same, and reports each size, before it and when it is done.

    Args:
        job: What.
        side: On what.
        ready: Brings the values of a size, and gives what makes a collective and tries it out.
        wait: Returns when the value that it is given is there.
    """
    for batch in job.batches:
        report(("size", batch))
        timed = _measure(job, batch, ready(batch), wait)
        report(("found", Found(batch, side, _of_all(timed))))


def rounds_within(budget_s: float, round_s: float) -> int:
    """How many rounds there is time for.

    Args:
        budget_s: The time that there is.
        round_s: What a round takes.

    Example:
        >>> rounds_within(2.0, 0.1), rounds_within(2.0, 60.0), rounds_within(2.0, 1e-4)
        (20, 5, 100)
    """
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_s / round_s)))


class _Progress:
    """Reports how many rounds are done, but seldom; without a word for long, ranks are taken to hang."""

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
    num_rounds = job.num_rounds or rounds_within(job.budget_s, _agreed(round_s))
    for index in range(num_rounds):
        turn = index % len(calls)
        for call in [*calls[turn:], *calls[:turn]]:
            call.timed.seconds.append(_call(call, wait))
            progress(index, num_rounds)


def _call(call: Call, wait: Callable[[Any], Any]) -> float:
    given = call.prepare()
    wait(given)
    dist.barrier()
    result, seconds = stopwatch(call.run, given, wait=wait)
    call.timed.wrong += call.num_wrong(result)  # of every one: XLA's Gloo is known to be wrong now and then
    return seconds


def _of_all(timed: list[Timed]) -> list[list[Timed]]:
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, timed)
    return of_all


def _agreed(seconds: float) -> float:
    """Rank 0's: all must take the same number of turns."""
    said = [seconds]
    dist.broadcast_object_list(said)
    return said[0]
