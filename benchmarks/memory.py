"""Memory of a device in a training step, by strategy: from the compiled program, beside a formula.

    python -m benchmarks memory --model seed_xl --target h100:2

State that lives across steps must be that of the layout to the byte; the formula leaves padding out. Where there are
GPUs, each strategy also takes two steps in processes of its own, in both frameworks, and a table has what the allocator
says after initialisation, at the peak of the steps and after them, as the assignment report's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import torch

import jaxddp
from jaxddp import STRATEGIES, targets
from jaxddp.instruments.inspect import transformer_training
from jaxddp.instruments.memory import held_bytes, step_memory
from jaxddp.models import SIZES
from jaxddp.planning.formulas import state_bytes

from .benchmark import WRONG, Benchmark, Case, Options, Say
from .ranks import FRAMEWORKS, Ranks, about, num_gpus
from .render import CHECK, Column, Row, mib
from .training.jax_side import JaxSide
from .training.setup import QUICK_MODEL, StrategySpec, TrainingSetup, check_batch, make_setup
from .training.torch_side import TorchSide

COMPONENTS = {
    "parameters": ("parameters",), "optimizer state": ("optimizer_state",), "batch": ("batch",),
    "others": ("others", "padding"), "within the step": ("temporaries",),
}  # fmt: skip
OF_EACH_STAGE = ("bucketed", "zero1", "zero2", "zero3")
ALLOCATORS = "What the allocator of the first GPU says"
ONE_RANK = "one rank has nothing to shard with: all strategies hold the same state here, and ZeRO saves nothing"


class MemorySetup(NamedTuple):
    """What is compiled for a target; ``batch_size`` sequences in all."""

    model: str
    target: str
    strategy: str
    batch_size: int


def cases(options: Options) -> list[Case]:
    """Each strategy, for ``h100:2`` or what was named; then on the GPUs that are here."""
    model, target = options.model or (QUICK_MODEL if options.quick else "seed_xl"), options.target or "h100:2"
    names, batch_size = options.strategies or (OF_EACH_STAGE if options.quick else STRATEGIES), options.batch_size or 32
    check_batch(batch_size, targets.target(target).num_devices, of="devices")
    found = [Case(name, MemorySetup(model, target, name, batch_size)) for name in names]
    if num_gpus():
        made = make_setup(options, model=model, batch_size=batch_size, num_steps=2)
        found += [
            Case(f"{framework} {name} on GPUs", replace(made, strategies={framework: (StrategySpec(name),)}))
            for framework in FRAMEWORKS
            for name in names
        ]
    return found


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """Compiles a strategy's step and compares its state with the layout, or takes two steps."""
    setup: Any = case.setup
    if isinstance(setup, TrainingSetup):
        say(f"{case.name}: two steps")
        yield setup.ranks.run(allocate, setup, in_jax="jaxddp" in setup.frameworks, say=say)
        return
    say(f"compiling {setup.strategy} of {setup.model} for {setup.target}")
    made = transformer_training(SIZES[setup.model], setup.batch_size)
    mesh, strategy = targets.mesh(setup.target), jaxddp.make_strategy(setup.strategy)
    trainer = jaxddp.Trainer(made.loss_fn, made.optimizer, strategy, mesh)
    state = trainer.abstract_state(made.params)
    memory, held = step_memory(trainer.compile(state, made.batch), state), held_bytes(trainer.layout(state))
    stage = int(setup.strategy[-1]) if setup.strategy[-1].isdigit() else 0
    formula = state_bytes(SIZES[setup.model].num_params, stage, mesh.size)
    apart = sum(memory[:2]) - sum(held[:2])
    yield {
        "framework": "jaxddp", "device": setup.target, "num_ranks": mesh.size, "strategy": setup.strategy,
        "model": setup.model, "dtype": "float32", "global_batch": setup.batch_size,
        "microbatch": setup.batch_size // mesh.size, "versions": {"jax": jax.__version__},
        "compiled": memory._asdict(), "compiled_bytes": sum(memory), "state_bytes": memory.state,
        "formula_bytes": formula.parameters + formula.optimizer_state,
        "notes": [ONE_RANK] if mesh.size == 1 else [], "check": f"{WRONG}{apart:+,} bytes" if apart else "ok",
    }  # fmt: skip


def allocate(ranks: Ranks, setup: TrainingSetup) -> dict[str, Any]:
    """What two steps take of the first GPU, less what was in use before; runs on each rank."""
    (framework,), ((spec,),) = setup.frameworks, setup.strategies.values()
    side: Any = (JaxSide if framework == "jaxddp" else TorchSide)(ranks, setup)

    def now() -> tuple[int, int]:
        if framework == "torchref":
            return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        found = jax.local_devices()[0].memory_stats()
        return found["bytes_in_use"], found["peak_bytes_in_use"]

    before, start = now()[0], side.start(spec, sends=True)
    after_init, run = now()[0], start()
    run.step(0), run.step(1)  # torch makes the optimizer's state in its first step
    after, peak = now()
    return about(ranks, framework) | {
        "table": ALLOCATORS, "strategy": spec.name, "model": setup.model, "dtype": setup.dtype,
        "global_batch": setup.global_batch, "microbatch": setup.global_batch // ranks.num,
        "after_init_bytes": after_init - before, "peak_bytes": peak - before, "after_step_bytes": after - before,
        "notes": [ONE_RANK] if ranks.num == 1 else [], "check": "ok",
    }  # fmt: skip


def _held(row: Row, keys: Sequence[str]) -> int | None:
    return sum(row["compiled"][key] for key in keys) if row.get("compiled") else None


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
            Column("after init", "after_init_bytes", "MiB", mib), Column("peak", "peak_bytes", "MiB", mib),
            Column("after the steps", "after_step_bytes", "MiB", mib), CHECK,
        ),
    },
    notes=(
        "within the step: temporaries as the compiler laid them out, activations, gradients and buckets together",
        "state: what lives across steps, parameters and optimizer state to the byte as the layout has them; by formula:"
        " without padding, counters and key",
    ),
)  # fmt: skip
