"""The interleaving by which variants are measured.

Variants take turns, one step each a round, and every round starts with another of them, so that a machine that drifts
moves all of them alike. What cannot be made, or fails in its first step, is left out, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

from jaxddp.training.clock import stopwatch
from torchref.launch import report

from ..harness.exchange import gather
from .measure import StepMetrics

_T = TypeVar("_T")

NUM_ROUNDS_IN_A_ROW = 5
NUM_PREVIEWED = 2  # timed rounds after which rank 0 reports its medians


class Variant(NamedTuple):
    """Something that takes a training step on the batch of a round, and returns when it is done."""

    label: str
    step: Callable[[int], StepMetrics | None]  # round -> metrics; of what is no training step None


class Attempts:
    """Things of which some cannot be made: those that fail anywhere are left out everywhere.

    Attributes:
        made: What could be made, by label.
        failed: Why the others could not.
    """

    def __init__(self, agree: Callable[[str], str]) -> None:
        """Starts with nothing.

        ``agree`` takes what went wrong here, empty if nothing did, and gives what went wrong on any rank.
        """
        self.made: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self._agree = agree

    def __call__(self, label: str, make: Callable[[], _T]) -> _T | None:
        """Makes one, or returns None, with the reason in ``failed``: whatever ``make`` raised, on any rank."""
        said, made = "", None
        try:
            made = make()
        except Exception as error:
            said = in_words(error)
        if said := self._agree(said):
            self.failed[label] = said
            self.made.pop(label, None)
            return None
        self.made[label] = made
        return made


def in_words(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def agree_over_ranks(said: str) -> str:
    """Gives the first text of any rank that is not empty; every rank of the process group must call it."""
    return next(filter(None, gather(said)), "")


def interleave(
    variants: Sequence[Variant],
    num_rounds: int,
    num_warmup: int,
    *,
    barrier: Callable[[], None] = lambda: None,
    wait: Callable[[Any], Any] = lambda result: None,
    agree: Callable[[str], str] = lambda said: said,
    wait_for_turn: Callable[[], None] = lambda: None,
    is_previewed: bool = True,
) -> tuple[dict[str, tuple[list[Any], list[float]]], dict[str, str]]:
    """Runs every variant once a round, in turn; one that fails in its first step takes part in no other.

    Args:
        variants: Each is stepped ``num_rounds`` times.
        num_rounds: Warm-up included.
        num_warmup: Rounds whose times are dropped.
        barrier: Called before each step, untimed, so that ranks start together.
        wait: Returns when the value that it is given is there.
        agree: As for `Attempts`.
        wait_for_turn: Called before each round; returns when the other framework's processes do nothing.
        is_previewed: Whether the first medians are reported.

    Returns:
        By label: all metrics, and the seconds of the timed rounds; and why others failed.
    """
    results: dict[str, tuple[list[Any], list[float]]] = {variant.label: ([], []) for variant in variants}
    first_steps = Attempts(agree)
    for index in range(num_rounds):
        wait_for_turn()
        shift = index % len(variants)
        for variant in [*variants[shift:], *variants[:shift]]:
            if variant.label in first_steps.failed:
                continue

            def timed(variant: Variant = variant, index: int = index) -> tuple[Any, float]:
                return stopwatch(variant.step, index, wait=wait)

            barrier()
            taken = first_steps(variant.label, timed) if index == 0 else timed()
            if taken is None:
                continue
            metrics, seconds = results[variant.label]
            metrics.append(taken[0])
            if index >= num_warmup:
                seconds.append(taken[1])
        report(("progress", index + 1, num_rounds))
        if is_previewed and index + 1 == num_warmup + NUM_PREVIEWED < num_rounds:
            medians_ms = {label: 1e3 * median(seconds) for label, (_, seconds) in results.items() if seconds}
            report(("preview", medians_ms, NUM_PREVIEWED, num_rounds - num_warmup))
    return {label: found for label, found in results.items() if label not in first_steps.failed}, first_steps.failed


def time_in_a_row(
    starts: Mapping[str, Callable[[int], Any]], num_steps: int, num_batches: int, **options: Any
) -> dict[str, list[float]]:
    """Times steps between two synchronisations, so that the host may run ahead of the device.

    ``starts`` start the step of a batch and read nothing of it; ``options`` are those of ``interleave``.

    Returns:
        By label, the seconds of a step in each round; nothing of one that fails.
    """

    def several(start: Callable[[int], Any]) -> Callable[[int], Any]:
        def run(index: int) -> Any:
            for place in range(num_steps):
                last = start((index * num_steps + place) % num_batches)
            return last

        return run

    report(("doing", f"training, {num_steps} steps in a row"))
    variants = [Variant(label, several(start)) for label, start in starts.items()]
    times, _ = interleave(variants, 1 + NUM_ROUNDS_IN_A_ROW, 1, is_previewed=False, **options)
    return {label: [one / num_steps for one in seconds] for label, (_, seconds) in times.items()}
