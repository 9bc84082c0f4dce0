"""Programs as people have them, before and after their port: the same weights, and how many lines.

A program is another file of this folder: what both forms share, then ``before`` and ``after``. ``data`` makes its
batches from a seed, ``before`` trains on one device or rank and ``after`` on several; both give their weights, in
float64. A program by shapes trains nothing: its port is compiled for a machine that is not here, and must communicate
as planned.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..benchmark import WRONG, Benchmark, Case, NotRun, Options, Say
from ..render import CHECK, Column, counts
from .train import Trained, Weights, train_in_jax, train_in_torch

NUM_RANKS, TARGET = 4, "h100:8"
ATOL = 1e-12  # in float64 room for the order of sums alone
NEEDS = {"haiku_mnist": "haiku", "midgpt_equinox": "equinox"}  # which are no dependencies of this project
MIN_MOVE = 1e-4  # of some weight; else nothing was trained


def cases(options: Options) -> list[Case]:
    """A case for each program."""
    return [Case(name, run) for name, run in PROGRAMS.items()]


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """The row of a program."""
    say(case.name)
    if (needed := NEEDS.get(case.name)) and not find_spec(needed):
        raise NotRun(f"needs {needed}")
    program = import_module(f"{__package__}.{case.name}")
    yield {
        "framework": "torchref" if case.setup is IN_TORCH else "jaxddp", "strategy": ", ".join(program.STRATEGIES),
        "lines_before": num_lines(program.before), "lines_after": num_lines(program.after),
    } | case.setup(program)  # fmt: skip


def num_lines(function: Callable[..., Any]) -> int:
    """Counts the lines of a function, without comments, blank lines and its docstring of one line."""
    lines = [line.strip() for line in inspect.getsource(function).splitlines()]
    return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)


def train(train_in: Callable[[Any, int], Trained], program: Any) -> dict[str, Any]:
    """Trains before the port and after it."""
    return compare(*train_in(program, NUM_RANKS))


def compare(start: Weights, end: Weights, after: Mapping[str, Sequence[Weights]]) -> dict[str, Any]:
    """Compares the weights that each rank has under each strategy with those before the port."""
    apart = {name: max(difference(found, end) for found in of_ranks) for name, of_ranks in after.items()}
    wrong = ", ".join(name for name, one in apart.items() if one > ATOL)
    wrong = wrong if difference(start, end) >= MIN_MOVE else "nothing was trained"
    return {
        "num_ranks": NUM_RANKS, "dtype": "float64", "difference": max(apart.values()), "tolerance": ATOL,
        "check": f"{WRONG}{wrong}" if wrong else "ok",
    }  # fmt: skip


def difference(found: Weights, right: Weights) -> float:
    """The largest of any element; infinite if names differ, or an element is not finite."""
    if found.keys() != right.keys():
        return np.inf
    largest = float(np.max([np.abs(one - right[name]).max() for name, one in found.items()]))  # NaN stays
    return largest if np.isfinite(largest) else np.inf


def compile_port(program: Any) -> dict[str, Any]:
    """Compiles a port for the target under each strategy, and compares its communication with the plan."""
    import jaxddp

    jaxddp.simulate_devices(NUM_RANKS)  # a program that trains may follow, and JAX starts here
    mesh, planned, wrong = jaxddp.targets.mesh(TARGET), [], []
    program.before(program.data(), mesh)
    for name in program.STRATEGIES:
        trainer, state, batch = program.after(program.data(), jaxddp.make_strategy(name), mesh)
        plan = sorted(trainer.planned(state, batch))
        planned.append(counts(plan))
        wrong += [name] * (jaxddp.gradient_collectives(trainer.compile(state, batch)) != plan)
    check = f"{WRONG}{', '.join(wrong)} not as planned" if wrong else "ok"
    return {"device": TARGET, "planned": "; ".join(planned), "check": check}


IN_JAX, IN_TORCH = partial(train, train_in_jax), partial(train, train_in_torch)
PROGRAMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(("flax_mnist", "flax_imagenet", "haiku_mnist", "midgpt_equinox"), IN_JAX),
    **dict.fromkeys(("gemma_shapes", "llama_shapes"), compile_port),
    **dict.fromkeys(("nanogpt", "cs336_naive", "cs336_individual", "cs336_bucketed", "cs336_sharded"), IN_TORCH),
}
COLUMNS = (
    Column("program", "case"), Column("framework"), Column("lines before", "lines_before"),
    Column("lines after", "lines_after"), Column("strategies", "strategy"),
    Column("max diff", "difference", form="{:.1e}".format), Column("tolerance", form="{:.0e}".format),
    Column("planned = compiled", "planned"), CHECK,
)  # fmt: skip
BENCHMARK = Benchmark(
    "ports", "programs as people have them, before and after they were moved onto the packages", (), cases, measure,
    {"Programs before and after their port": COLUMNS},
    notes=(
        "lines: of the functions before and after, without comments and blank lines",
        f"max diff: of any weight after 4 or 5 steps on {NUM_RANKS} ranks, to before the port on one, in float64",
        f"planned = compiled: of a program by shapes, which is compiled for {TARGET} and not run",
    ),
)  # fmt: skip
