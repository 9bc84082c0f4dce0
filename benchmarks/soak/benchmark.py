"""Soak: training goes on for an hour, while faults from a seeded list happen to it in the first three quarters.

Each side trains the same model under the same list: jaxddp's ``train`` or a program of torchref, with this project's
launcher and watchdog, and then, for a shorter time, the same program of torch under torchrun alone. The last quarter
is without faults, so that memory, file handles and threads are seen to grow if they do. At the end the weights must
be those of a run of as many steps that nothing happened to.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..harness.options import Options
from ..harness.run import FAILED, Run
from ..harness.values import listed, plain
from ..report.section import show
from .faults import UNEXPECTED, Fault, draw_faults
from .goodput import USEFUL, account
from .guard import Workplace, guarded
from .program import ENDLESS, Program
from .section import section
from .supervised import START_BOUND_S, Job
from .usage import longest_lives

SIDES = {"jaxddp": "jax_rank", "torchref": "torch_rank", "torchrun alone": "torch_rank"}
MINUTES, QUICK_MINUTES = 60.0, 3.0
ALONE_SHARE = 0.375  # of the minutes
FAULTY_SHARE = 0.75
CHECKPOINT_EVERY, STEP_S, MAX_RESTARTS = 50, 0.1, 10_000


@dataclasses.dataclass(frozen=True)
class SoakSetup:
    """A soak.

    Attributes:
        minutes: By side.
        faults: Injected in place of those that are drawn.
        quiet_steps: After the last fault the run ends, if the time is not over before.
    """

    minutes: dict[str, float]
    num_ranks: int
    seed: int
    faults: tuple[Fault, ...] = ()
    step_s: float = STEP_S
    quiet_steps: int = ENDLESS


def describe(options: Options) -> tuple[SoakSetup, str]:
    """Describes the sides and their minutes.

    Raises:
        ValueError: If there are fewer than two ranks, or the seed is negative.
    """
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    sides = {"jax": ["jaxddp"], "torch": ["torchref"], "both": ["jaxddp", "torchref"]}[options.framework or "jax"]
    num_ranks, seed = options.ranks or 2, options.seed or 0
    if num_ranks < 2:
        raise ValueError(f"ranks (={num_ranks}) must be at least 2: one rank waits for no other")
    if seed < 0:
        raise ValueError(f"seed (={seed}) must not be negative")
    setup = SoakSetup({**dict.fromkeys(sides, minutes), "torchrun alone": ALONE_SHARE * minutes}, num_ranks, seed)
    words = listed([f"{side} for {plain(of_side)} minutes" for side, of_side in setup.minutes.items()])
    return setup, f"{words}, {num_ranks} ranks, faults of seed {seed}"


def run(this: Run, setup: SoakSetup) -> bool:
    """Runs each side, prints the tables and writes the folder.

    All faults must be survived, nothing may be left behind or grow, and weights must be those of an undisturbed run.
    """
    for side in setup.minutes:
        this.part(side, partial(side_rows, this, setup, side))
    return show(this, section(this.rows))


def side_rows(this: Run, setup: SoakSetup, side: str) -> list[dict[str, Any]]:
    """Runs a side: a row per fault, one of the whole, and one per kind of process."""
    records = this.folder / side.replace(" ", "-")
    records.mkdir(exist_ok=True)
    with guarded() as workplace:
        program = Program(
            module=f"{__package__}.{SIDES[side]}", num_ranks=setup.num_ranks, is_watched=side != "torchrun alone",
            events=str(workplace.folder / "events"), checkpoint=str(workplace.folder / "disk" / "checkpoints"),
            checkpoint_every=CHECKPOINT_EVERY, log_dir=str(records), step_s=setup.step_s, max_restarts=MAX_RESTARTS,
            seed=setup.seed,
        )  # fmt: skip
        Path(program.checkpoint).mkdir()
        since_s, seconds = time.monotonic(), 60 * setup.minutes[side]
        with Job(program, workplace, records) as job:
            rows = []
            for row in _endured(job, setup, since_s + FAULTY_SHARE * seconds, since_s + seconds):
                rows.append(row)
                words = f"{row['fault']} at step {row['step']}: back after {row['back_s']:.1f} s, {row['check']}"
                this.console.print(f"{side}: {words}", soft_wrap=True, markup=False)
            left = job.finish()
        events = job.events()
        over = next(index for index, event in enumerate(events) if event["kind"] == "over")
        parts = account(events[: over + 1])
        wall_s = sum(parts.values())
        whole = {
            "minutes": wall_s / 60, "num_faults": len(rows), "goodput": parts[USEFUL] / wall_s, "parts_s": parts,
            "lines": job.num_lines, "printed_bytes": job.num_printed_bytes,
            "log_bytes": sum(path.stat().st_size for path in records.glob("rank-*.log")),
            "left_behind": left or "nothing",
            "disk": "a tmpfs" if workplace.has_disk else "RLIMIT_FSIZE",
            **_compare(program, workplace, records),
        }  # fmt: skip
        if left and program.is_watched and whole["check"] == "ok":
            whole["check"] = f"WRONG: left behind {left}"
    packages = ("jax", "torch") if side == "jaxddp" else ("torch",)
    common = {"side": side, "num_ranks": setup.num_ranks, "seed": setup.seed}
    common |= {"versions": {package: version(package) for package in packages}}
    return [common | row for row in (*rows, whole, *longest_lives(job.samples()))]


def _endured(job: Job, setup: SoakSetup, faulty_until_s: float, end_s: float) -> Iterator[dict[str, Any]]:
    """Injects faults, waits for the end of the time, and gives the rows of the faults."""
    if job.await_steps(1, time.monotonic() + START_BOUND_S) != "steps":
        raise OSError(f"training did not start within {START_BOUND_S:g} s, or ended")

    def awaited(num_steps: int, until_s: float) -> Generator[dict[str, Any], None, bool]:
        while (why := job.await_steps(num_steps, until_s)) == "lost":
            yield job.endure(Fault(UNEXPECTED, 0, 0))
        return why == "steps"

    for fault in setup.faults or draw_faults(setup.seed, setup.num_ranks):
        if not (yield from awaited(fault.after_steps, faulty_until_s)):
            break
        yield job.endure(fault)
    yield from awaited(setup.quiet_steps, end_s)


def _compare(program: Program, workplace: Workplace, records: Path) -> dict[str, Any]:
    """Trains as many steps as the newest checkpoint has, undisturbed, and compares the weights."""
    weights = import_module(program.module).weights
    folder = workplace.folder / "undisturbed"
    (records / folder.name).mkdir()
    folder.mkdir()
    try:
        step, found = weights(program.checkpoint)
        undisturbed = dataclasses.replace(
            program, checkpoint=str(folder), steps=step, checkpoint_every=0, step_s=0.0, max_restarts=0,
            log_dir=str(records / folder.name),
        )  # fmt: skip
        with Job(undisturbed, workplace, records / folder.name) as job:
            status = job.wait(START_BOUND_S + step * program.step_s)
        same_step, expected = weights(folder)
    except (OSError, ValueError) as error:
        return {"check": f"{FAILED}{error}"}
    if status or same_step != step:
        return {"check": f"{FAILED}the undisturbed run ended with status {status} at step {same_step} of {step}"}
    difference = max(float(np.abs(found[name] - array).max()) for name, array in expected.items())
    check = "ok" if difference == 0 else "WRONG: other weights than those of an undisturbed run"
    return {"step": step, "max_weight_difference": difference, "check": check}
