"""Scaling efficiency, measured on this machine's ranks; ``python -m jaxddp inspect --target`` simulates beyond.

    strong   the global batch is fixed:     efficiency = T(first) first / (T(n) n)
    weak     the batch per rank is fixed:   efficiency = T(first) / T(n)

Numbers of ranks run one after the other in processes of their own, so medians are compared, not rounds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .benchmark import Benchmark, Case, Options, Say
from .ranks import choose_ranks
from .render import CHECK, STEP, Column, Row, by, counts, interval, percent
from .strategies import measure_steps
from .timing import compare
from .training.setup import BYTE_MODEL, GPU_SEQUENCES, OPTIONS, QUICK_MODEL, check_batch, make_setup, strategies_of

NUM_RANKS, QUICK_RANKS, BATCH = 4, 2, 8
EFFICIENCY = "Efficiency by number of ranks"


def cases(options: Options) -> list[Case]:
    """Each number of ranks with its batches, by framework or both at once."""
    default = QUICK_RANKS if options.quick else NUM_RANKS
    most = choose_ranks(options.ranks, options.on, default=default)
    fewer = [2**power for power in range(most.num.bit_length()) if 2**power < most.num and not most.is_job]
    counts = [*fewer, most.num]
    sequences, multiple = GPU_SEQUENCES * most.num if most.kind == "gpus" else BATCH, math.lcm(*counts)
    batch_size = options.batch_size or -(-sequences // multiple) * multiple  # each number of ranks can split it
    check_batch(batch_size, most.num)
    modes = {(count, batch_size): ["strong"] for count in counts}
    for count in counts:
        modes.setdefault((count, batch_size // most.num * count), []).append("weak")
    found, names = [], options.strategies or ["bucketed"]
    for (count, size), its_modes in sorted(modes.items()):
        ranks = replace(most, num=count, hosts=most.hosts[:count])
        given = type(options)(**vars(options) | {"batch_size": size})
        setup = make_setup(
            given, model=QUICK_MODEL if options.quick else BYTE_MODEL, batch_size=size,
            num_steps=4 if options.quick else 12, ranks=ranks,
        )  # fmt: skip
        setup = replace(setup, strategies=strategies_of(names, setup.model), with_baselines=False)
        for group in setup.groups():
            name = f"{count} ranks, batch {size}, {' and '.join(group.frameworks)}"
            found.append(Case(name, (group, its_modes)))
    return found


def measure_case(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """Rows of a case, one for each mode that it serves."""
    setup, modes = case.setup
    for row in measure_steps(case._replace(setup=setup), say):
        yield from (row | {"mode": mode} for mode in modes)


def efficiency(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each step that was right: its efficiency relative to the fewest ranks, and the 95 % interval."""
    sound = [row for row in rows if row["check"] == "ok" and row.get("median_ms") and row.get("mode")]
    for (mode, framework, label), some in by(sound, "mode", "framework", "label").items():
        first = min(some, key=lambda row: row["num_ranks"])
        for row in sorted(some, key=lambda row: row["num_ranks"]):
            share = first["num_ranks"] / row["num_ranks"] if mode == "strong" else 1.0
            found = {"table": EFFICIENCY, "mode": mode, "framework": framework, "label": label}
            found |= {key: row.get(key) for key in ("device", "num_ranks", "global_batch")}
            found["efficiency"] = first["median_ms"] / row["median_ms"] * share
            if row is not first:
                ratio = compare(first["rounds_ms"], row["rounds_ms"], paired=False)
                found |= {"low": ratio.low * share, "high": ratio.high * share}
            crowded = row["device"] == "cpu" and row["num_ranks"] > (row["cores"] or 1)
            note = f"ok, but {row['num_ranks']} ranks share {row['cores']} cores: it says nothing of a cluster"
            yield found | {"check": note if crowded else "ok"}


_HEAD = (
    Column("scaling", "mode"), Column("framework"), Column("strategy", "label"), Column("ranks", "num_ranks"),
    Column("batch", "global_batch"),
)  # fmt: skip
BENCHMARK = Benchmark(
    "scaling", "strong and weak scaling on the ranks that are here", (*OPTIONS, "strategies"), cases, measure_case,
    {
        "Steps by number of ranks": (*_HEAD, Column("compiled", form=counts), *STEP, CHECK),
        EFFICIENCY: (
            *_HEAD, Column("efficiency", form=percent), interval("95 % interval", "low", "high", form=percent), CHECK
        ),
    },
    check=efficiency,
    notes=(
        "efficiency: of the speed per rank that the fewest ranks have; numbers of ranks ran one after the other, so the"
        " interval is that of two medians",
    ),
)  # fmt: skip
