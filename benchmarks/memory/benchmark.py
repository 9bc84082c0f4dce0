"""Memory of a device in a training step, by ZeRO stage: from the compiled program, an allocator and formulas.

Three moments, as in the assignment report's table: after initialisation, before the update and after the step. State
that lives across steps must match its formula to the byte. For the rest, the formula gives the unavoidable part, and
the table the distance of the compiled program from it.

    python -m benchmarks memory --model seed_xl --target h100:2
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import jax

from jaxddp import STRATEGIES, make_strategy, targets
from jaxddp.instruments.memory import DeviceBytes, state_formula
from jaxddp.instruments.targets import TargetError, check_installed
from jaxddp.models import SIZES, TransformerConfig
from jaxddp.planning.cost.memory import StateBytes, activation_bytes, exact_bucket_bytes, gathered_bytes
from jaxddp.planning.cost.workload import transformer

from ..harness.console import progress_of
from ..harness.options import Options
from ..harness.run import NOT_RUN, NotRun, Run
from ..report.section import show
from ..strategies.benchmark import QUICK_MODEL, check_batch_size
from .report_figures import NUM_RANKS, SEQUENCES, figures
from .section import section
from .torch_peak import allocate_torch
from .variants import CPU, Allocation, MemorySetup, allocate, read

MOMENTS = {"after_init": "after init", "before_update": "before the update", "after_step": "after the step"}
# What a row of each holds. A step is one program, so its later moments are peaks.
FIGURES = {"after_init": "in use", "before_update": "peak until the backward ends", "after_step": "peak of the update"}
OF_EACH_STAGE = ("bucketed", "zero1", "zero2", "zero3")
SCALAR_BYTES = 4 + 4 + 8  # optax's step count, that of the state, and its key


def describe(options: Options) -> tuple[MemorySetup, str]:
    """Describes what is compiled.

    Defaults: seed_xl (byte_shallow in the short form), the target ``h100:2``, all strategies (one per stage), and a
    batch of 32. The target ``cpu:N`` means N simulated devices of this machine.

    Raises:
        ValueError: If a name is unknown or the batch cannot be split.
    """
    model = options.model or (QUICK_MODEL if options.quick else "seed_xl")
    target, batch_size = options.target or "h100:2", options.batch_size or 32
    strategies = options.strategies or (OF_EACH_STAGE if options.quick else tuple(STRATEGIES))
    if model not in SIZES:
        raise ValueError(f"unknown model {model!r}: one of {', '.join(SIZES)}")
    for name in strategies:
        if name not in STRATEGIES:
            raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    chip, _, count = target.partition(":")
    if chip == CPU:
        if not count.isdecimal() or int(count) < 1:
            raise ValueError(f"target {target!r} must be {CPU}:N for N simulated devices, 1 or more")
        num_ranks = int(count)
    else:
        num_ranks = targets.target(target).num_devices
    check_batch_size(batch_size, num_ranks)
    setup = MemorySetup(model, target, num_ranks, tuple(dict.fromkeys(strategies)), batch_size)
    context = setup.config.context
    described = (
        f"{model}, {setup.config.num_params:,} parameters, on {target}: {batch_size} x {context} tokens a step, AdamW,"
        f" float32; {', '.join(setup.strategies)}"
    )
    return setup, described


def run(this: Run, setup: MemorySetup) -> bool:
    """Reads every variant, prints the tables and writes the folder; compiled state must be as by its formula."""
    with progress_of(this.console, "memory") as progress:
        for name in setup.strategies:
            progress(0, ("doing", f"compiling {name} for {setup.target}"))
            this.part(name, partial(compiled_rows, setup, name))
        progress(0, ("doing", "asking the allocators"))
        for framework, ask in (("", allocate), ("torchref ", allocate_torch)):
            for name in setup.strategies:
                rows = partial(allocator_rows, setup, name, framework, ask)
                if any(row["check"].startswith(NOT_RUN) for row in this.part(f"allocator, {framework}{name}", rows)):
                    break  # the same for every strategy
    return show(this, section(this.rows))


def compiled_rows(setup: MemorySetup, name: str) -> Iterator[dict[str, Any]]:
    """Compiles a strategy's step and compares its memory with the formulas, and with the assignment report's figures.

    Yields:
        A row for each moment, and for each figure of the report.
    """
    if not setup.is_here:
        try:
            check_installed(targets.target(setup.target))
        except TargetError as error:
            raise NotRun(str(error)) from None
    (memory, padding), formula, record = read(setup, name), formulas(setup, name), _record(setup)
    for moment, words in MOMENTS.items():
        compiled: DeviceBytes = getattr(memory, moment)
        difference = compiled.total - compiled.padding - formula[moment]
        if moment == "after_init":
            check = "ok" if difference == 0 else f"WRONG: {difference:+,} bytes"
        else:
            check = f"{difference / formula[moment]:+.1%}"
        yield record | {
            "strategy": name,
            "moment": words,
            "is": FIGURES[moment],
            "compiled": dataclasses.asdict(compiled),
            "formula": formula[moment],
            "temporaries": memory.temporaries,
            "padding_share": padding,
            "check": check,
        }
    if (setup.model, setup.num_ranks, setup.batch_size) == ("seed_xl", NUM_RANKS, SEQUENCES):
        for figure in figures(name, memory):
            yield record | {"figure": figure._asdict(), "check": f"{figure.here / figure.comparable - 1:+.1%}"}


def allocator_rows(
    setup: MemorySetup, name: str, framework: str, ask: Callable[[MemorySetup, str], Allocation | str]
) -> Iterator[dict[str, Any]]:
    """Compares an allocator's figures with the formula.

    ``framework`` is a prefix of the strategy's name; ``ask`` returns the figures, or why there are none.
    """
    said = ask(setup, name)
    row = _record(setup) | {"strategy": framework + name}
    if isinstance(said, str):
        yield row | {"allocator": said, "check": f"{NOT_RUN}{said}"}
        return
    if framework:
        check = "not compared: torch makes the optimizer's state in its first step"
    elif said.num_ranks != setup.num_ranks:
        check = f"not compared: {said.num_ranks} ranks, the formula is of {setup.num_ranks}"
    else:
        check = f"after init {said.after_init / formulas(setup, name)['after_init'] - 1:+.1%}"
    yield row | {"allocator": said._asdict(), "check": check}


def formulas(setup: MemorySetup, name: str) -> dict[str, int]:
    """Bytes that each device holds at each of ``MOMENTS``: the state to the byte, and the unavoidable rest.

    before the update   what the backward needs of the forward; at stage 3 two gathered units
    after the step      gradients: buckets in flight, and shards that are already reduced
    """
    config, strategy = setup.config, make_strategy(name)
    work = transformer(**dataclasses.asdict(config))
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in work.tensors}
    state = state_formula(params, strategy, setup.num_ranks)
    held = state.parameters + state.optimizer_state + SCALAR_BYTES
    tokens = setup.batch_size // setup.num_ranks * config.context
    batch = 2 * 4 * tokens
    activations = int(activation_bytes(tokens, kept_per_token(config, strategy.gathers_in_loss), element_bytes=4))
    gathered = int(gathered_bytes(work.unit_params, 4)) if strategy.gathers_in_loss else 0
    return {
        "after_init": held,
        "before_update": held + batch + activations + gathered,
        "after_step": held + batch + _gradients(state, strategy.plan(()).kind, work.tensor_elements, setup.num_ranks),
    }


def kept_per_token(config: TransformerConfig, gathers_units: bool) -> int:
    """The elements of a token that the backward needs of the forward.

    Gathered units keep less: their inputs and the results of their matrix products. In a layer these are the input,
    query, key, value, scores, mix and output of attention, gate and up; in the head, its norm and the logits.
    """
    if not gathers_units:
        work = transformer(**dataclasses.asdict(config))
        return work.kept_per_token + work.kept_cut_per_token
    layer = 6 * config.width + config.num_heads * config.context + 2 * config.hidden
    return config.num_layers * layer + 2 * config.width + config.vocab


def _gradients(state: StateBytes, kind: str, leaf_elements: Sequence[int], num_ranks: int) -> int:
    if kind == "reduce-scatter":  # all have started by the end of the backward, and hold buffers
        return exact_bucket_bytes(leaf_elements, num_ranks, 4) + state.optimizer_state // 2
    return state.gradients


def _record(setup: MemorySetup) -> dict[str, Any]:
    versions = {"jax": version("jax"), "jaxlib": version("jaxlib"), "python": platform.python_version()}
    return dataclasses.asdict(setup) | {"dtype": "float32", "versions": versions}
