"""Memory of a device in a training step, by strategy: from the compiled program, a formula and the allocators.

    python -m benchmarks memory --model seed_xl --target h100:2

State that lives across steps must be that of the layout to the byte; the formula leaves padding out. Where there are
GPUs, each strategy also takes two steps in processes of its own, so that none is charged for another's memory, and the
table has what the allocators say at three moments, as the assignment report's: after initialisation, at the peak of the
step, and after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

import jaxddp
from jaxddp import STRATEGIES, targets
from jaxddp.instruments.inspect import Training, transformer_training
from jaxddp.instruments.memory import held_bytes, step_memory
from jaxddp.models import SIZES, build
from jaxddp.planning.formulas import state_bytes

from .benchmark import WRONG, Benchmark, Case, NotRun, Options, Say
from .ranks import FRAMEWORKS, Ranks, choose_ranks, num_gpus
from .render import CHECK, MIB, Column, Row, mib, new_figure
from .training.setup import QUICK_MODEL, check_batch, check_known

COMPONENTS = {
    "parameters": ("parameters",), "optimizer state": ("optimizer_state",), "batch": ("batch",),
    "others": ("others", "padding"), "within the step": ("temporaries",),
}  # fmt: skip
OF_EACH_STAGE = ("bucketed", "zero1", "zero2", "zero3")
ALLOCATORS = "What the allocator of the first GPU says"
ONE_RANK = "one rank has nothing to shard with: all strategies hold the same state here, and ZeRO saves nothing"


@dataclass(frozen=True)
class MemorySetup:
    """What is compiled for a target, or run on ``ranks``; ``batch_size`` sequences in all."""

    model: str
    target: str
    num_ranks: int
    strategy: str
    batch_size: int
    framework: str = "jaxddp"
    ranks: Ranks | None = None


def cases(options: Options) -> list[Case]:
    """Each strategy compiled for ``h100:2``, or what was named; then on the GPUs that are here, in both frameworks."""
    model, target = options.model or (QUICK_MODEL if options.quick else "seed_xl"), options.target or "h100:2"
    names = options.strategies or (OF_EACH_STAGE if options.quick else tuple(STRATEGIES))
    check_known("model", [model], SIZES)
    check_known("strategy", names, STRATEGIES)
    num_ranks, batch_size = targets.target(target).num_devices, options.batch_size or 32
    check_batch(batch_size, num_ranks, of="devices")
    found = [Case(name, MemorySetup(model, target, num_ranks, name, batch_size)) for name in names]
    if num_gpus():
        ranks = choose_ranks(None, "gpus", default=1)
        ranks = replace(ranks, num=min(ranks.num, num_ranks))
        size = batch_size // num_ranks * ranks.num
        found += [
            Case(f"{framework} {name} on GPUs", MemorySetup(model, target, ranks.num, name, size, framework, ranks))
            for framework in FRAMEWORKS
            for name in names
        ]
    return found


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """The row of a case: of a compiled program, or of an allocator."""
    setup: MemorySetup = case.setup
    if setup.ranks is None:
        say(f"compiling {setup.strategy} of {setup.model} for {setup.target}")
        row = compiled_row(setup)
    else:
        say(f"{case.name}: two steps")
        allocate = allocate_jax if setup.framework == "jaxddp" else allocate_torch
        row = setup.ranks.run(allocate, setup, in_jax=setup.framework == "jaxddp", say=say)
    yield row | {
        "framework": setup.framework, "strategy": setup.strategy, "model": setup.model, "dtype": "float32",
        "num_ranks": setup.num_ranks, "global_batch": setup.batch_size,
        "microbatch": setup.batch_size // setup.num_ranks, "notes": [ONE_RANK] if setup.num_ranks == 1 else [],
    }  # fmt: skip


def compiled_row(setup: MemorySetup) -> dict[str, Any]:
    """Compiles a strategy's step and compares its state with the layout; raises NotRun without a compiler."""
    made = transformer_training(SIZES[setup.model], setup.batch_size)
    trainer = _trainer(setup, made, targets.mesh(setup.target))
    state = trainer.abstract_state(made.params)
    try:
        program = trainer.compile(state, made.batch)
    except ValueError as error:
        raise (NotRun(str(error)) if "install" in str(error) else error) from None
    memory, held = step_memory(program, state), held_bytes(trainer.layout(state))
    stage = int(setup.strategy[-1]) if setup.strategy[-1].isdigit() else 0
    formula = state_bytes(SIZES[setup.model].num_params, stage, setup.num_ranks)
    apart = sum(memory[:2]) - sum(held[:2])
    return {
        "device": setup.target, "compiled": memory._asdict(), "compiled_bytes": sum(memory),
        "state_bytes": memory.state, "formula_bytes": formula.parameters + formula.optimizer_state,
        "check": f"{WRONG}{apart:+,} bytes" if apart else "ok", "versions": {"jax": version("jax")},
    }  # fmt: skip


def _trainer(setup: MemorySetup, made: Training, mesh: Any) -> jaxddp.Trainer:
    return jaxddp.Trainer(made.loss_fn, made.optimizer, jaxddp.make_strategy(setup.strategy), mesh)


def allocate_jax(ranks: Ranks, setup: MemorySetup) -> dict[str, Any]:
    """Takes two steps; the first rank's figures, less what was in use before."""
    mesh, made = ranks.mesh(), transformer_training(SIZES[setup.model], setup.batch_size)
    device, batch = jax.local_devices()[0], jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), made.batch)

    def now() -> dict[str, int]:
        if not (found := device.memory_stats()):
            raise ValueError(f"{device.platform} devices count no allocations")
        return found

    before, trainer = now(), _trainer(setup, made, mesh)
    state = trainer.init(jax.tree.map(np.asarray, build(setup.model)[1]))
    after_init = now()
    for _ in range(2):
        state, _ = jax.block_until_ready(trainer.step(state, jaxddp.local_rows(batch)))
    after = now()
    first, then, last = (one["bytes_in_use"] for one in (before, after_init, after))
    return _figures(device.device_kind, first, then, after["peak_bytes_in_use"], last)


def allocate_torch(ranks: Ranks, setup: MemorySetup) -> dict[str, Any]:
    """As `allocate_jax`; torch makes the optimizer's state in its first step, as in the report's table."""
    import torch

    import torchref
    from torchref.models import build, loss_fn
    from torchref.registry import make_training

    now = torch.cuda.memory_allocated
    before, module = now(), build(setup.model).cuda()
    net, optimizer = make_training(setup.strategy, module, torch.optim.AdamW, {}, lr=1e-3)
    trainer, after_init = torchref.Trainer(loss_fn, optimizer, net), now()
    shape = setup.batch_size // setup.num_ranks, SIZES[setup.model].context
    tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
    for _ in range(2):
        trainer.step({"tokens": tokens, "targets": tokens})
    torch.cuda.synchronize()
    return _figures(torch.cuda.get_device_name(), before, after_init, torch.cuda.max_memory_allocated(), now())


def _figures(device: str, before: int, after_init: int, peak: int, after: int) -> dict[str, Any]:
    found = {"after_init_bytes": after_init - before, "peak_bytes": peak - before, "after_step_bytes": after - before}
    return {"table": ALLOCATORS, "device": device, **found, "check": "ok"}


def _held(row: Row, keys: Sequence[str]) -> int | None:
    return sum(row["compiled"][key] for key in keys) if row.get("compiled") else None


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """Stacked bars of the components."""
    some = [row for row in rows if row.get("compiled")][::-1]
    if not some:
        return
    figure, axes = new_figure("Memory of a device in a step", 1, 1, height=3.6)
    names, left = [row["strategy"] for row in some], np.zeros(len(some))
    for component, keys in COMPONENTS.items():
        held = np.array([(_held(row, keys) or 0) / MIB for row in some])
        axes[0][0].barh(names, held, left=left, label=component)
        left += held
    axes[0][0].set_xlabel("MiB")
    figure.legend(loc="outside lower center", ncols=len(COMPONENTS))
    yield figure


BENCHMARK = Benchmark(
    "memory", "what a step holds on each device, by strategy", ("quick", "batch_size", "model", "strategies", "target"),
    cases, measure,
    {
        "Bytes on each device by strategy": (
            Column("strategy", lambda row: row.get("strategy") or row.get("case")), Column("device"),
            *(Column(name, partial(_held, keys=keys), "MiB", mib) for name, keys in COMPONENTS.items()),
            Column("compiled", "compiled_bytes", "MiB", mib), Column("state", "state_bytes", "MiB", mib),
            Column("by formula", "formula_bytes", "MiB", mib), CHECK,
        ),
        ALLOCATORS: (
            Column("strategy"), Column("framework"), Column("device"), Column("ranks", "num_ranks"),
            Column("in use after init", "after_init_bytes", "MiB", mib),
            Column("peak of the step", "peak_bytes", "MiB", mib),
            Column("in use after the step", "after_step_bytes", "MiB", mib), CHECK,
        ),
    },
    plot,
    notes=(
        "within the step: temporaries as the compiler laid them out, activations, gradients and buckets together",
        "state: what lives across steps, parameters and optimizer state to the byte as the layout has them; by formula:"
        " without padding, counters and key",
    ),
)  # fmt: skip
