"""Scaling efficiency, measured on this machine's ranks and simulated beyond.

    strong   the global batch is fixed:     efficiency = T(first) first / (T(n) n)
    weak     the batch per rank is fixed:   efficiency = T(first) / T(n)

Numbers of ranks run one after the other in processes of their own, so medians are compared, not rounds. Simulated steps
are compiled for targets, read back and simulated with published rates of chips and links.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxddp
from jaxddp.models import abstract

from .benchmark import WRONG, Benchmark, Case, NotRun, Options, Say
from .ranks import choose_ranks
from .render import CHECK, STEP, Column, Row, by, counts, interval, new_figure, percent, whiskers
from .timing import compare
from .training.rank import measure
from .training.setup import BYTE_MODEL, OPTIONS, PEERS, QUICK_MODEL, SIZES, in_words, make_setup, strategies_of

NUM_RANKS, QUICK_RANKS, BATCH = 4, 2, 8
TARGET, QUICK_TARGET, FIRST = "h100:512", "h100:64", 8
WEAK_SEQUENCES, STRONG_LEAST = 16, 2  # per device; of strong scaling at the largest target
EFFICIENCY = "Efficiency by number of ranks"


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Strategies to simulate on a target."""

    model: str
    names: tuple[str, ...]
    target: str
    mode: str
    num_sequences: int


def cases(options: Options) -> list[Case]:
    """Each number of ranks with its batches, by framework or both at once; then each target."""
    default = QUICK_RANKS if options.quick else NUM_RANKS
    most = choose_ranks(options.ranks, options.on, default=default)
    batch_size = options.batch_size or -(-BATCH // most.num) * most.num
    counts = [2**power for power in range(most.num.bit_length()) if 2**power < most.num] + [most.num]
    counts = [most.num] if most.is_job else counts
    modes: dict[tuple[int, int], list[str]] = {}
    for count in counts:
        modes.setdefault((count, batch_size), []).append("strong")
        modes.setdefault((count, batch_size // most.num * count), []).append("weak")
    found, names = [], tuple(options.strategies or ("bucketed",))
    for (count, size), its_modes in modes.items():
        ranks = replace(most, num=count, hosts=most.hosts[:count])
        given = type(options)(**vars(options) | {"batch_size": size})
        setup = make_setup(
            given, model=QUICK_MODEL if options.quick else BYTE_MODEL, batch_size=size,
            num_steps=4 if options.quick else 12, ranks=ranks,
        )  # fmt: skip
        setup = replace(setup, strategies=strategies_of(names, setup.model), with_baselines=False)
        for group in setup.groups():
            name = f"{count} ranks, batch {size}, {' and '.join(group)}"
            found.append(Case(name, (setup, group, its_modes)))
    ours = tuple(name for name in names if name not in (*PEERS["jaxddp"], *PEERS["torchref"]))
    return [*found, *_targets(options, ours)] if ours and not most.is_job else found


def _targets(options: Options, names: tuple[str, ...]) -> list[Case]:
    chip, _, count = (options.target or (QUICK_TARGET if options.quick else TARGET)).partition(":")
    if not count.isdecimal() or int(count) < FIRST:
        raise ValueError(f"target (={options.target}) must be a chip and a count of at least {FIRST}, such as {TARGET}")
    counts, most = [FIRST], int(count)
    while counts[-1] * 8 < most:
        counts.append(counts[-1] * 8)
    counts += [most] if counts[-1] != most else []
    model = QUICK_MODEL if options.quick else "seed_xl"
    found = []
    for num in counts:
        for mode in ("strong", "weak"):
            sequences = WEAK_SEQUENCES * num if mode == "weak" else STRONG_LEAST * most
            setup = Simulated(model, names, f"{chip}:{num}", mode, sequences)
            found.append(Case(f"{mode}, simulated {setup.target}", setup))
    return found


def measure_case(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """Rows of a case, one for each mode that it serves."""
    if isinstance(case.setup, Simulated):
        yield from simulate(case.setup, say)
        return
    setup, frameworks, modes = case.setup
    say(f"{case.name}: {in_words(setup)}, {' and '.join(modes)} scaling")
    for row in measure(setup, frameworks, say):
        yield from (row | {"mode": mode, "how": "measured"} for mode in modes)


def simulate(setup: Simulated, say: Say) -> Iterator[dict[str, Any]]:
    """Compiles and simulates; raises NotRun if the target's compiler is not installed."""
    say(f"compiling {', '.join(setup.names)} of {setup.model} for {setup.target}")
    loss_fn, params = abstract(setup.model)
    tokens = jax.ShapeDtypeStruct((setup.num_sequences, SIZES[setup.model].context), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    try:
        found = jaxddp.inspect(
            loss_fn, optax.adamw(1e-3), params, batch, target=setup.target, strategies=list(setup.names)
        )
    except ValueError as error:
        if "install" in str(error):
            raise NotRun(str(error)) from None
        raise
    for one in found:
        compiled = one.schedule.gradient_collectives()
        right = sorted(compiled) == sorted(one.planned)
        num = int(setup.target.partition(":")[2])
        yield {
            "framework": "jaxddp", "backend": "simulated", "device": setup.target.partition(":")[0], "num_ranks": num,
            "model": setup.model, "strategy": one.strategy, "label": one.strategy, "mode": setup.mode,
            "how": "simulated", "global_batch": setup.num_sequences, "microbatch": setup.num_sequences // num,
            "planned": one.planned, "compiled": compiled, "median_ms": one.simulation.step_s * 1e3,
            "exposed_ms": one.simulation.exposed_s * 1e3,
            "check": "ok" if right else f"{WRONG}{len(one.planned)} collectives planned, others found",
        }  # fmt: skip


def efficiency(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each step that was right: its efficiency relative to the fewest ranks, and the 95 % interval."""
    sound = [row for row in rows if row["check"] == "ok" and row.get("median_ms") and row.get("mode")]
    for (mode, how, framework, label), some in by(sound, "mode", "how", "framework", "label").items():
        first = min(some, key=lambda row: row["num_ranks"])
        for row in sorted(some, key=lambda row: row["num_ranks"]):
            share = first["num_ranks"] / row["num_ranks"] if mode == "strong" else 1.0
            kept = ("device", "num_ranks", "global_batch", "median_ms", "p10_ms", "p90_ms")
            found = {"table": EFFICIENCY, "mode": mode, "how": how, "framework": framework, "label": label}
            found |= {key: row.get(key) for key in kept} | {"efficiency": first["median_ms"] / row["median_ms"] * share}
            if how == "measured" and row is not first:
                ratio = compare(first["rounds_ms"], row["rounds_ms"], paired=False)
                found |= {"low": ratio.low * share, "high": ratio.high * share}
            crowded = how == "measured" and row["device"] == "cpu" and row["num_ranks"] > (row["cores"] or 1)
            note = f"ok, but {row['num_ranks']} ranks share {row['cores']} cores: it says nothing of a cluster"
            yield found | {"check": note if crowded else "ok"}


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """Efficiency over ranks, a panel for each mode."""
    placed = by([row for row in rows if row.get("efficiency")], "mode")
    if not placed:
        return
    figure, axes = new_figure("Scaling efficiency", 1, len(placed), height=3.6)
    for axis, ((mode,), some) in zip(axes[0], placed.items(), strict=True):
        for (framework, label, how), curve in by(some, "framework", "label", "how").items():
            shares = [row["efficiency"] for row in curve]
            ends = whiskers(shares, *([row.get(key) or row["efficiency"] for row in curve] for key in ("low", "high")))
            axis.errorbar([row["num_ranks"] for row in curve], shares, yerr=ends, capsize=3, marker="o",
                          linestyle="--" if how == "simulated" else "-",
                          label=f"{framework} {label}, {how}")  # fmt: skip
        axis.set(title=f"{mode} scaling", xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.legend(fontsize="small")
    yield figure


_HEAD = (Column("scaling", "mode"), Column("framework"), Column("strategy", "label"), Column("how"))
_RANKS = (Column("ranks", "num_ranks"), Column("batch", "global_batch"))
BENCHMARK = Benchmark(
    "scaling", "strong and weak scaling, measured here and simulated up to 512 H100s",
    (*OPTIONS, "strategies", "target"),
    cases, measure_case,
    {
        "Steps by number of ranks": (
            *_HEAD, *_RANKS, Column("compiled", form=counts), *STEP, Column("exposed", "exposed_ms", "ms"), CHECK,
        ),
        EFFICIENCY: (
            *_HEAD, *_RANKS, *STEP, Column("efficiency", form=percent),
            interval("95 % interval", "low", "high", form=percent), CHECK,
        ),
    },
    plot, efficiency,
    ("efficiency: of the speed per rank that the fewest ranks have; numbers of ranks ran one after the other, so the"
     " interval is that of two medians", "simulated: compiled for the target, with published rates of its chips and"
     " links"),
)  # fmt: skip
