"""Both frameworks in processes of their own, one after the other or in turns: a part of a run for each.

The second starts from the weights of the first, and where single-process training ends must be the same in both, so
these weights stay in the run's folder until both are there: a run that was stopped goes on with them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxddp.checkpoint.weights import export_weights, load_weights
from torchref.launch import OnMessage, cancel_calls

from ..harness.console import progress_of, progress_of_all
from ..harness.ranks import Ranks
from ..harness.run import Run, is_failed
from ..harness.turns import Turns
from ..harness.values import short, signed
from ..report.steps import BETWEEN
from ..report.steps import name as label
from . import jax_side, torch_side
from .measure import SideResult, TrainingSetup, largest_difference, merge_ranks
from .steps import metric_tolerance, step_rows

FRAMEWORKS = ("jaxddp", "torchref")
MEASURED = ("torchref", "jaxddp")  # in this order: torch compiles nothing, so its rows come first
_A_HOST = "a process a host"  # of a job, beside a process for each rank
RowsOf = Callable[[str, TrainingSetup, SideResult], list[dict[str, Any]]]


def measure_both(
    this: Run, setups: Mapping[str, TrainingSetup], rows_of: RowsOf = step_rows, *, name: str = ""
) -> list[dict[str, Any]]:
    """Runs a setup in each framework, and lays their single-process training side by side.

    Returns:
        The rows of both, and that of the comparison; nothing of a framework without a strategy.
    """
    again = {f"jaxddp, {_A_HOST}": ranks for ranks in setups["jaxddp"].ranks.layouts()[1:]}
    parts = {one: f"{one} {name}".strip() for one in (*FRAMEWORKS, *again, BETWEEN)}
    files = {one: this.folder / f"{re.sub(r'[^a-z0-9]+', '-', part)}.npz" for one, part in parts.items()}

    def measure(framework: str, ranks: Ranks | None = None) -> list[dict[str, Any]]:
        setup = setups[framework] if ranks is None else replace(setups[framework], ranks=ranks)
        if ranks is None and framework in sides:
            side = sides[framework]()
        else:
            with progress_of(this.console, framework) as show:
                side = _run(framework, setup, files[BETWEEN], show)
        export_weights(files[framework], side.trained)
        rows = rows_of(framework, setup, side)
        for row in rows:
            this.console.print(in_words(row), soft_wrap=True, markup=False)
        return rows

    def compare() -> list[dict[str, Any]]:
        return [_comparison(setups["jaxddp"], files, {one: rows[one] for one in FRAMEWORKS})]

    # A peer alone is of one framework, and leaves nothing to compare.
    chosen = [one for one in MEASURED if setups[one].of(one)]
    sides: dict[str, Callable[[], SideResult]] = {}
    with contextlib.ExitStack() as stack:
        if set(chosen) == set(FRAMEWORKS) and not any(this.has(parts[one]) for one in chosen):
            sides = stack.enter_context(_in_turns(this, setups, files[BETWEEN]))
        rows = {one: this.part(parts[one], lambda one=one: measure(one)) for one in chosen}  # type: ignore[misc]
    for part, ranks in again.items() if "jaxddp" in chosen else ():
        rows[part] = this.part(parts[part], lambda ranks=ranks: measure("jaxddp", ranks))  # type: ignore[misc]
    compared = this.part(parts[BETWEEN], compare) if len(chosen) == len(FRAMEWORKS) else []
    together = [row for of_one in (*rows.values(), compared) for row in of_one]
    if not any(is_failed(row) for row in together):
        for path in files.values():
            path.unlink(missing_ok=True)
    return together


def in_words(row: Mapping[str, Any]) -> str:
    """A measured step in a line."""
    if "median_ms" not in row:
        return f"{row['framework']} {label(row)}: {row['check']}"
    exposed = "" if row["exposed_ms"] is None else f", {signed(row['exposed_ms'])} exposed"
    spread = f"p10-p90 {short(row['p10_ms'])}-{short(row['p90_ms'])}, {row['num_timed']} rounds"
    return f"{row['framework']} {label(row)}: {short(row['median_ms'])} ms ({spread}){exposed}, {row['check']}"


@contextlib.contextmanager
def _in_turns(
    this: Run, setups: Mapping[str, TrainingSetup], initial: Path
) -> Iterator[dict[str, Callable[[], SideResult]]]:
    """Starts both frameworks at once, if their setups say so; yields what waits for the results of each."""
    if not all(setups[one].takes_turns and not setups[one].ranks.per_host for one in FRAMEWORKS):
        yield {}
        return
    num_processes = {one: setups[one].ranks.processes(one == "jaxddp")[0] for one in FRAMEWORKS}
    with (
        contextlib.closing(Turns(num_processes)) as turns,
        progress_of_all(this.console, *FRAMEWORKS) as shown,
        ThreadPoolExecutor(len(FRAMEWORKS)) as threads,
    ):
        found = {
            one: threads.submit(_run, one, replace(setups[one], turns=turns.address), initial, shown[one])
            for one in FRAMEWORKS
        }
        for one, side in found.items():
            side.add_done_callback(lambda _, one=one: turns.leave(one))  # type: ignore[misc]
        try:
            yield {one: side.result for one, side in found.items()}
        except BaseException:
            while not all(side.done() for side in found.values()):  # the threads may start others meanwhile
                cancel_calls()
                time.sleep(0.1)
            raise


def _run(framework: str, setup: TrainingSetup, initial: Path, show: OnMessage) -> SideResult:
    return (_run_jax if framework == "jaxddp" else _run_torch)(setup, initial, show)


def _run_jax(setup: TrainingSetup, initial: Path, show: OnMessage) -> SideResult:
    side = merge_ranks(setup.ranks.run_jax(jax_side.run, setup, on_message=show))
    if not initial.exists():  # peers of JAX alone
        export_weights(initial, side.weights)
    return side


def _run_torch(setup: TrainingSetup, initial: Path, show: OnMessage) -> SideResult:
    if not initial.exists():
        export_weights(initial, Ranks(1, "simulated").run_jax(jax_side.initial_weights, setup)[0])
    return merge_ranks(setup.ranks.run_torch(torch_side.run, setup, str(initial.resolve()), on_message=show))


def _comparison(
    setup: TrainingSetup, files: Mapping[str, Path], rows: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """A row that says how far single-process training of the two frameworks is apart."""
    losses = [row["reference_loss"] for one in FRAMEWORKS for row in rows[one] if "reference_loss" in row]
    if not all(any("reference_loss" in row for row in rows[one]) for one in FRAMEWORKS):
        raise ValueError("one of the frameworks has no results")
    weights = largest_difference(*(load_weights(files[one]) for one in FRAMEWORKS))
    apart = abs(losses[0] / losses[-1] - 1)
    check = "ok"
    if setup.tolerance is not None and not weights <= setup.tolerance:
        check = f"WRONG: weights differ by more than {setup.tolerance:.0e}"
    elif not apart <= (bound := metric_tolerance(setup.dtype)):
        check = f"WRONG: the loss differs by more than {bound:.0%}"
    return {
        "framework": " and ".join(FRAMEWORKS),
        "strategy": "single-process training",
        "model": setup.model,
        "max_weight_difference": weights,
        "max_metric_difference": apart,
        "tolerance": setup.tolerance,
        "check": check,
    }
