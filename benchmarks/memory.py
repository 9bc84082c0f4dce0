"""Memory of a device in a training step, by strategy: from the compiled program, beside a formula.

    python -m benchmarks memory --model seed_xl --target h100:2

State that lives across steps must be that of the layout to the byte; the formula leaves padding out.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

import jaxddp
from jaxddp import STRATEGIES, targets
from jaxddp.instruments.inspect import transformer_training
from jaxddp.instruments.memory import DeviceBytes, held_bytes, step_memory
from jaxddp.models import SIZES
from jaxddp.planning.formulas import state_bytes

from .benchmark import WRONG, Benchmark, Case, Options, Say
from .render import CHECK, Column, mib
from .training.setup import QUICK_MODEL, check_batch

OF_EACH_STAGE = ("bucketed", "zero1", "zero2", "zero3")


class MemorySetup(NamedTuple):
    """What is compiled for a target; ``batch_size`` sequences in all."""

    model: str
    target: str
    strategy: str
    batch_size: int


def cases(options: Options) -> list[Case]:
    """Each strategy, for ``h100:2`` or what was named."""
    model, target = options.model or (QUICK_MODEL if options.quick else "seed_xl"), options.target or "h100:2"
    names, batch_size = options.strategies or (OF_EACH_STAGE if options.quick else STRATEGIES), options.batch_size or 32
    check_batch(batch_size, targets.target(target).num_devices, of="devices")
    return [Case(name, MemorySetup(model, target, name, batch_size)) for name in names]


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """Compiles a strategy's step and compares its state with the layout."""
    setup: MemorySetup = case.setup
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
        **memory._asdict(), "compiled_bytes": sum(memory), "state_bytes": memory.state,
        "formula_bytes": formula.parameters + formula.optimizer_state,
        "check": f"{WRONG}{apart:+,} bytes" if apart else "ok",
    }  # fmt: skip


BENCHMARK = Benchmark(
    "memory", "what a step holds on each device, by strategy", ("quick", "batch_size", "model", "strategies", "target"),
    cases, measure,
    {
        "Bytes on each device by strategy": (
            Column("strategy", lambda row: row.get("strategy") or row.get("case")), Column("device"),
            *(Column(name.replace("_", " "), name, "MiB", mib) for name in DeviceBytes._fields),
            Column("compiled", "compiled_bytes", "MiB", mib), Column("state", "state_bytes", "MiB", mib),
            Column("by formula", "formula_bytes", "MiB", mib), CHECK,
        ),
    },
    notes=(
        "temporaries: within the step, as the compiler laid them out: activations, gradients and buckets together",
        "state: what lives across steps, parameters and optimizer state to the byte as the layout has them; by formula:"
        " without padding, counters and key",
    ),
    strategies=STRATEGIES,
)  # fmt: skip
