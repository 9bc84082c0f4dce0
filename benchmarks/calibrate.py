"""The step that ``inspect`` predicts beside the step that runs: time, memory and kernels of the built-in models.

A row is a model, an arithmetic and a strategy. Its step is compiled for the target and simulated, in a process without
GPUs; then it runs on the ranks, ten steps in a row a time, since a step alone waits for Python; then three steps are
profiled. Stopping JAX's profiler may crash a process (jax#40260): then the steps are timed anew, and not profiled.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist

import jaxddp
from jaxddp import STRATEGIES, targets
from jaxddp.instruments.inspect import Training, inspect, step_memory, transformer_training
from jaxddp.instruments.trace import PRODUCTS, read_trace
from jaxddp.models import SIZES, build
from jaxddp.planning.chips import CHIPS
from jaxddp.training.clock import stopwatch, summarize
from torchref.launch import RankError

from .benchmark import WRONG, Benchmark, Case, Options, Say, first_line
from .ranks import Ranks, about, choose_ranks, mesh_of, say_on_rank, slowest
from .render import CHECK, Column, Row, mib, new_figure, percent
from .training.jax_side import place
from .training.setup import DTYPES, OPTIONS, QUICK_MODEL, check_batch

STEPS_IN_A_ROW, WARMUP, PROFILED = 10, 5, 3
MODELS = ("small", "seed_xl", "medium", "large")
REHEARSED = "rehearsed: {device} is no {chip}, so times of the two say nothing about each other"


@dataclass(frozen=True)
class CalibrationSetup:
    """A step that is predicted and taken; ``batch_size`` sequences in all, ``num_rounds`` times ten steps."""

    model: str
    dtype: str
    strategy: str
    target: str
    ranks: Ranks
    batch_size: int
    num_rounds: int

    def training(self) -> Training:
        """The training by its shapes; sets the precision of products, which tracing reads."""
        jax.config.update("jax_default_matmul_precision", "highest" if self.dtype == "f32" else None)
        made = transformer_training(SIZES[self.model], self.batch_size)
        return made._replace(options={"compute_dtype": jnp.bfloat16}) if self.dtype == "bf16" else made


def cases(options: Options) -> list[Case]:
    """Models by arithmetic and strategy, on the GPUs that are here, or rehearsed on simulated devices."""
    ranks = choose_ranks(options.ranks, options.on, default=1, on_cpus="simulated")
    on_gpus = ranks.kind == "gpus"
    of_all = ["tiny"] if not on_gpus else [QUICK_MODEL] if options.quick else MODELS
    models = [options.model] if options.model else of_all
    dtypes = [options.dtype] if options.dtype else DTYPES if on_gpus and not options.quick else ["f32"]
    strategies = options.strategies or ["bucketed"]
    target = targets.target(options.target or f"{_chip_here() if on_gpus else 'h100'}:{ranks.num}")
    if target.num_devices != ranks.num:
        raise ValueError(f"target (={target.spec}) must have as many devices as there are ranks (={ranks.num})")
    batch_size = options.batch_size or 16 * ranks.num
    check_batch(batch_size, ranks.num)
    num_rounds = options.steps or (3 if options.quick else 10)
    setups = [
        CalibrationSetup(model, dtype, name, target.spec, ranks, batch_size, num_rounds)
        for model in models for dtype in dtypes for name in strategies
    ]  # fmt: skip
    return [Case(f"{one.model} {one.dtype} {one.strategy}", one) for one in setups]


def _chip_here() -> str:
    """The chip of the first GPU, by torch, which starts no context for it in this process."""
    kind = torch.cuda.get_device_properties(0).name
    return next((name for name, chip in CHIPS.items() if kind in chip.device_kinds), "h100")


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """The row of a case."""
    setup: CalibrationSetup = case.setup
    say(f"{case.name}: compiling for {setup.target}")
    row = Ranks(1, "simulated").run(predict, setup, in_jax=True, say=say)
    say(f"{case.name}: {setup.num_rounds} rounds of {STEPS_IN_A_ROW} steps on {setup.ranks.num} ranks")
    try:
        row |= setup.ranks.run(take_steps, setup, True, in_jax=True, say=say)
    except (RankError, ValueError) as error:
        row |= setup.ranks.run(take_steps, setup, False, in_jax=True, say=say)
        row["notes"] = [f"{case.name} was not profiled: {first_line(error)}"]
    chip = targets.target(setup.target).chip
    if row["device"] in chip.device_kinds:
        row["ratio"] = row["predicted_ms"] / row["median_ms"]
    else:
        row["notes"] = [*row.get("notes", []), REHEARSED.format(device=row["device"], chip=chip.name)]
    apart = row["state_bytes"] - row["predicted_state_bytes"]
    wrong = f"{apart:+,} bytes of state" if apart else "" if math.isfinite(row["loss"]) else f"loss {row['loss']}"
    yield row | {
        "strategy": setup.strategy, "model": setup.model, "dtype": setup.dtype, "target": setup.target,
        "global_batch": setup.batch_size, "microbatch": setup.batch_size // setup.ranks.num,
        "check": f"{WRONG}{wrong}" if wrong else "ok",
    }  # fmt: skip


def predict(ranks: Ranks, setup: CalibrationSetup) -> dict[str, Any]:
    """What ``inspect`` says; runs in a process of its own, without GPUs."""
    jax.config.update("jax_platforms", "cpu")
    made = setup.training()
    (one,) = inspect(
        made.loss_fn, made.optimizer, made.params, made.batch, setup.strategy, target=setup.target, **made.options
    )
    assert one.memory is not None
    works = [operation.total_work for operation in one.schedule.operations]
    return {
        "predicted_ms": one.simulation.step_s * 1e3, "predicted_exposed_ms": one.simulation.exposed_s * 1e3,
        "predicted_state_bytes": one.memory["parameters"] + one.memory["optimizer_state"],
        "predicted_temporary_bytes": one.memory["temporaries"],
        "predicted_kernels": sum(work.num_bytes > 0 or work.flops > 0 for work in works),
    }  # fmt: skip


def take_steps(ranks: Ranks, setup: CalibrationSetup, is_profiled: bool) -> dict[str, Any]:
    """Times steps of the slowest rank, reads the memory of the program and of the allocator; runs on each rank."""
    mesh, made = mesh_of(ranks), setup.training()
    trainer = jaxddp.Trainer(made.loss_fn, made.optimizer, jaxddp.make_strategy(setup.strategy), mesh, **made.options)
    tokens = np.random.default_rng(0).integers(SIZES[setup.model].vocab, size=made.batch["tokens"].shape)
    batch = {"tokens": tokens.astype(np.int32), "targets": np.roll(tokens, -1, 1).astype(np.int32)}
    batch, state = place(jaxddp.local_rows(batch), mesh), trainer.init(build(setup.model)[1])
    memory = step_memory(trainer.compile(state, batch), state)

    def take(count: int) -> float:
        nonlocal state
        for _ in range(count):
            state, metrics = trainer.step(state, batch)
        jax.block_until_ready((state, metrics))
        return float(metrics["loss"])

    loss, seconds = take(WARMUP), []
    for _ in range(setup.num_rounds):
        dist.barrier()
        loss, elapsed_s = stopwatch(take, STEPS_IN_A_ROW)
        seconds.append(elapsed_s / STEPS_IN_A_ROW)
        say_on_rank()
    allocated = jax.local_devices()[0].memory_stats() or {}
    return about(ranks, "jaxddp") | summarize(slowest(seconds))._asdict() | {
        "loss": loss, "state_bytes": memory.parameters + memory.optimizer_state,
        "temporary_bytes": memory.temporaries, "peak_bytes": allocated.get("peak_bytes_in_use"),
    } | (profile(take) if is_profiled else {})  # fmt: skip


def profile(take: Callable[[int], float]) -> dict[str, Any]:
    """Kernels of a step on the first rank, what share of them is products, and exposed time; runs on each rank."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            dist.barrier()  # the profiler takes longer to start on some ranks than on others
            take(PROFILED)
        trace = read_trace(folder)
    kinds, overlaps = trace.kinds(), trace.overlaps().values()
    return {
        "kernels": round(sum(count for count, _ in kinds.values()) / PROFILED / len(overlaps)),
        "products_share": kinds.get(PRODUCTS, (0, 0.0))[1] / sum(own_us for _, own_us in kinds.values()),
        "exposed_ms": max(one.exposed_us for one in overlaps) / PROFILED / 1e3,
        "span_ms": max(one.span_us for one in overlaps) / PROFILED / 1e3,
    }


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """Measured and predicted times side by side."""
    some = [row for row in rows if row.get("predicted_ms")]
    figure, axes = new_figure("A step as predicted for the target, and as measured", height=1.2 + 0.4 * len(some))
    axis, places = axes[0][0], np.arange(len(some))[::-1]
    axis.barh(places + 0.2, [row["median_ms"] for row in some], 0.38, label=f"measured, {some[0]['device']}")
    axis.barh(places - 0.2, [row["predicted_ms"] for row in some], 0.38, label=f"predicted, {some[0]['target']}")
    axis.set_yticks(places, [str(row["case"]) for row in some])
    axis.set(xlabel="ms", xscale="log")
    figure.legend(loc="outside lower center", ncols=2)
    yield figure


BENCHMARK = Benchmark(
    "calibrate", "the step that inspect predicts beside the step that runs",
    (*OPTIONS, "strategies", "target"), cases, measure,
    {
        "Steps as predicted and as measured": (
            Column("case"), Column("ranks", "num_ranks"), Column("batch", "global_batch"), Column("device"),
            Column("target"), Column("measured", "median_ms", "ms"), Column("predicted", "predicted_ms", "ms"),
            Column("predicted / measured", "ratio"), Column("exposed", "exposed_ms", "ms"),
            Column("predicted exposed", "predicted_exposed_ms", "ms"), Column("kernels"),
            Column("predicted kernels", "predicted_kernels"), Column("products' share", "products_share", "", percent),
            Column("state", "state_bytes", "MiB", mib), Column("temporaries", "temporary_bytes", "MiB", mib),
            Column("predicted temporaries", "predicted_temporary_bytes", "MiB", mib),
            Column("peak", "peak_bytes", "MiB", mib), CHECK,
        ),
    },
    plot,
    notes=(
        f"measured: {STEPS_IN_A_ROW} steps in a row, by their number; predicted: compiled for the target and simulated",
        "bf16: copies of float32 parameters, as inspect --dtype bf16; tf32: float32 whose products are in TF32",
    ),
    strategies=STRATEGIES,
)  # fmt: skip
