"""Every benchmark in one run, also over a lab where one can be made."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from ..harness.options import Options
from ..harness.run import NotRun, Run
from ..lab.benchmark import lab_for, link_holds
from ..registry import BENCHMARKS
from ..suite import Setups, describe_each, finish, run_described, run_each, run_one

NAMES = ("strategies", "buckets", "collectives", "scaling", "memory", "gates")
NOT_QUICK = ("gates",)


def describe(options: Options) -> tuple[tuple[Options, Setups], str]:
    """Describes the benchmarks that are run, as they do, with an estimate of the minutes."""
    names = [name for name in NAMES if not (options.quick and name in NOT_QUICK)]
    chosen = [BENCHMARKS[name] for name in (*names, "lab")]
    minutes = sum(one.quick_minutes if options.quick else one.full_minutes for one in chosen)
    line = f"{', '.join(names)}, lab: about {minutes} minutes on two cores"
    return (options, describe_each(names, options)), line


def run(this: Run, setup: tuple[Options, Setups]) -> bool:
    """Runs the benchmarks, each with a folder of its own."""
    options, setups = setup
    run_each(this, setups)

    def on_a_lab(inner: Run) -> bool:
        with ExitStack() as stack:
            try:
                # The lab has one rank per host, whatever ranks the other benchmarks have.
                given = stack.enter_context(lab_for("lab", replace(options, on=None, ranks=None)))
            except ValueError as reason:
                raise NotRun(str(reason)) from reason
            as_asked = link_holds(given, inner.folder, this.console)
            return run_described("lab", BENCHMARKS["lab"].module.describe(given), inner) and as_asked

    run_one(this, "lab", on_a_lab)
    return finish(this, [])
