"""What a training step holds on each device, by ZeRO stage: from the compiled program, an allocator and formulas.

Three moments, as the blog's table has them: after initialisation, before the step's update and after the step. What
lives across steps must agree with its formula to the byte; of what comes and goes in between, the formulas say what
cannot be done without, and the table how far the compiled program is from that.

    python -m benchmarks memory --model seed_xl --target h100:2
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from jaxddp import STRATEGIES, make_strategy, targets
from jaxddp.cost.memory import StateBytes, activation_bytes, exact_bucket_bytes, gathered_bytes
from jaxddp.cost.workload import transformer
from jaxddp.memory import DeviceBytes, state_formula
from jaxddp.models import SIZES, TransformerConfig
from jaxddp.target_compile import check_installed

from ..console import progress_of
from ..options import Options
from ..run import Run
from ..strategies import check_batch_size
from .source import NUM_RANKS, SEQUENCES, figures
from .table import Row, mib, print_tables, write_tables
from .torch_peak import allocate_torch
from .variants import CPU, Allocation, Read, Setup, allocate, read_all

MOMENTS = {"after_init": "after init", "before_update": "before the update", "after_step": "after the step"}
SCALAR_BYTES = 4 + 4 + 8  # optax's count of steps, the state's own, and its key


def describe(options: Options) -> tuple[Setup, str]:
    """Describes what is compiled.

    Args:
        options: A size of the transformer (seed_xl), a target (``h100:2``), or ``cpu:2`` for simulated devices of this
            machine, strategies (one of each stage) and the batch size (32).

    Returns:
        The setup, and its description in a line.

    Raises:
        ValueError: If a name is unknown, the batch cannot be split, or the target's compiler is not installed.
    """
    model, target, batch_size = (
        options.model or ("small" if options.quick else "seed_xl"),
        options.target or "h100:2",
        options.batch_size or 32,
    )
    strategies = options.strategies or ("bucketed", "zero1", "zero2", "zero3")
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
        check_installed(targets.target(target))
        num_ranks = targets.target(target).num_devices
    check_batch_size(batch_size, num_ranks)
    setup = Setup(model, target, num_ranks, tuple(dict.fromkeys(strategies)), batch_size)
    context = setup.config.context
    described = (
        f"{model}, {setup.config.num_params:,} parameters, on {target}: {batch_size} x {context} tokens a step, AdamW,"
        f" float32; {', '.join(setup.strategies)}"
    )
    return setup, described


def run(this: Run, setup: Setup) -> bool:
    """Reads every variant, prints the table and fills the folder.

    Args:
        this: The folder, console and rows of this run.
        setup: What to compile.

    Returns:
        Whether formula and compiled program agree to the byte about what lives across steps.
    """
    folder, console = this.folder, this.console
    read: dict[str, Read] = {}
    allocated: dict[str, Allocation | str] = {}
    with progress_of(console, "memory") as show:
        show(0, ("doing", f"compiling {len(setup.strategies)} programs for {setup.target}"))
        for name, found in read_all(setup):
            read[name] = found
            show(0, ("doing", f"{name} is compiled, {len(read)} of {len(setup.strategies)}"))
        show(0, ("doing", "asking the allocators"))
        for framework, ask in (("", allocate), ("torchref ", allocate_torch)):
            for name in setup.strategies:
                allocated[framework + name] = ask(setup, name)
                if isinstance(allocated[framework + name], str):
                    break
    rows = [row for name in setup.strategies for row in _rows(setup, name, read[name], allocated.get(name))]
    is_sources = (setup.model, setup.num_ranks, setup.batch_size) == ("seed_xl", NUM_RANKS, SEQUENCES)
    compared = figures({name: one.memory for name, one in read.items()}) if is_sources else []
    notes = list(_notes(read, allocated))
    print_tables(console, f"{setup.model} on {setup.target}, bytes on each device", rows, compared, notes)
    write_tables(folder, setup, rows, compared, allocated, notes)
    console.print(f"\nwritten to {folder}: table.md, metrics.jsonl", soft_wrap=True)
    return all(row.check == "ok" for row in rows if row.moment == MOMENTS["after_init"])


def formulas(setup: Setup, name: str) -> dict[str, int]:
    """Gives what each device holds by formula: the state to the byte, and beside it what cannot be done without.

        before the update   what the backward needs of the forward; at stage 3 two gathered units
        after the step      gradients, those that are buckets in flight and those that are shards already

    Args:
        setup: What is compiled.
        name: The strategy.

    Returns:
        Bytes of each of ``MOMENTS``.
    """
    config, strategy = setup.config, make_strategy(name)
    work = transformer(**dataclasses.asdict(config))
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in work.tensors}
    state = state_formula(params, strategy, setup.num_ranks)
    held = state.parameters + state.optimizer_state + SCALAR_BYTES
    tokens = setup.batch_size // setup.num_ranks * config.context
    batch = 2 * 4 * tokens
    activations = int(activation_bytes(tokens, kept_per_token(config, strategy.stage), element_bytes=4))
    gathered = int(gathered_bytes(work.unit_params, 4)) if strategy.stage == 3 else 0
    return {
        "after_init": held,
        "before_update": held + batch + activations + gathered,
        "after_step": held + batch + _gradients(state, strategy.stage, work.tensor_elements, setup.num_ranks),
    }


def kept_per_token(config: TransformerConfig, stage: int) -> int:
    """Counts the elements of a token that the backward needs of the forward.

    Units of stage 3 keep less: their inputs and the results of their matrix products, in a layer the input, query, key,
    value, scores, mix and output of attention, gate and up; the last unit, the head, keeps its norm and its logits.

    Args:
        config: The model's sizes.
        stage: 0 to 3.

    Returns:
        Their number.
    """
    if stage < 3:
        work = transformer(**dataclasses.asdict(config))
        return work.kept_per_token + work.kept_cut_per_token
    layer = 6 * config.width + config.num_heads * config.context + 2 * config.hidden
    return config.num_layers * layer + 2 * config.width + config.vocab


def _gradients(state: StateBytes, stage: int, leaf_elements: Sequence[int], num_ranks: int) -> int:
    if stage in (1, 2):  # every reduce-scatter has started by the end of the backward, and holds its buffer
        return exact_bucket_bytes(leaf_elements, num_ranks, 4) + state.optimizer_state // 2
    return state.gradients


def _rows(setup: Setup, name: str, read: Read, allocated: Allocation | str | None) -> Iterator[Row]:
    formula = formulas(setup, name)
    for moment, words in MOMENTS.items():
        compiled: DeviceBytes = getattr(read.memory, moment)
        difference = compiled.total - compiled.padding - formula[moment]
        if moment == "after_init":
            check = "ok" if difference == 0 else f"WRONG: {difference:+,} bytes"
        else:
            check = f"{difference / formula[moment]:+.1%}"
        in_use = None
        if isinstance(allocated, Allocation) and allocated.num_ranks == setup.num_ranks:
            in_use = {"after_init": allocated.after_init, "before_update": allocated.peak}.get(moment)
        yield Row(name, words, compiled, formula[moment], in_use, check)


def _notes(read: dict[str, Read], allocated: dict[str, Allocation | str]) -> Iterator[str]:
    yield (
        "compiled: arguments of the program, and what is alive beside them at the peak before and after the end of the"
        " backward, read from its schedule; activations are made by the forward, gradients by the backward (those of"
        " activations too: the program does not tell them apart), buckets are what collectives send and receive"
    )
    yield (
        "check: what lives across steps is as the formula says, to the byte; at the other moments how far the compiled"
        " program is from its formula"
    )
    for name, (memory, padding) in read.items():
        alive = max(memory.before_update.temporary, memory.after_step.temporary)
        tiles = memory.after_init.padding
        yield (
            f"{name}: the compiler lays temporaries out in {mib(memory.temporaries)} MiB,"
            f" {memory.temporaries / alive - 1:.1%} more than is alive at the peak; padding of shards {padding:.4%}"
            + (f", of layouts {mib(tiles)} MiB" if tiles else "")
        )
    for name, said in allocated.items():
        if isinstance(said, str):
            yield f"allocator: not run, {said}"
        else:
            yield (
                f"allocator of {said.device}, {said.num_ranks} ranks, {name}: {mib(said.after_init)} MiB after init,"
                f" {mib(said.peak)} at most in a step, {mib(said.after_step)} after it"
            )
