"""What the planner's formulas give for step times and collectives that others measured and published.

Steps of grade A whose model is that of ``jaxddp.models`` are also compiled for the same GPUs and simulated, in a minute
each, unless ``--quick``. Nothing is run, and no constant is fitted to a row. Scores:

    collectives    median of |ln(predicted / published)|, from 1 MiB up, of tables that the curves are not made of
    scaling        median difference of efficiency, T(fewest GPUs) / T(more), in percentage points, within one source
    steps          median of |predicted / published - 1|
    order          pairs of strategies, apart by more than 2 %, in the published order
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxddp import STRATEGIES, bucketed
from jaxddp.communication.buckets import MIB
from jaxddp.network import Network, measured
from jaxddp.planning.chips import CHIPS, Chip, Target
from jaxddp.planning.estimate import Run, estimate
from jaxddp.planning.products import as_measured
from jaxddp.planning.workload import transformer

from .benchmark import NOT_RUN, WRONG, Benchmark, Case, NotRun, Options, Say
from .ranks import Ranks
from .render import CHECK, Column, Row, by, new_figure, percent, size

STEPS, COMPILED, COLLECTIVES, SCORES = "Steps", "Compiled and simulated", "Collectives", "Scores"
_PRODUCTS = {"bf16": ("bfloat16", 2), "fp8": ("float8", 2), "tf32": ("tf32", 4), "fp32": ("float32", 4)}
_STRATEGIES = (
    ("DDP naive + sharded", "sharded_optimizer"), ("DDP overlap per parameter + sharded", "sharded_optimizer"),
    ("DDP naive", "naive"), ("DDP flat", "flat"), ("DDP overlap per parameter", "overlapped"),
    ("DDP overlap bucketed", "bucketed"), ("DP (XLA SPMD)", "flat"), ("DP x", "flat"), ("DP + ZeRO-1", "zero1"),
    ("FSDP", "zero3"),
)  # fmt: skip
# GPUs by what their names hold, with the bytes per second of their memory where it is another than the chip's.
_GPUS = (
    ("H200", "h200", None), ("H100 96GB", "h100", 2.4e12), ("H100", "h100", None), ("A100 40GB", "a100", 1.555e12),
    ("A100", "a100", None),
)  # fmt: skip
_UNNAMED_GPU = ("a100", 1.935e12)  # its source is inferred to be an A100 on PCIe
_APART = 0.02
_TICKS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5)


def read(name: str) -> list[dict[str, Any]]:
    """The published ``steps`` or ``collectives``."""
    found = json.loads(Path(__file__).with_name(f"published_{name}.json").read_text())
    rows: list[dict[str, Any]] = found["rows" if name == "steps" else "tables"]
    return rows


def run_of(row: Row) -> Run:
    """The planner's view of a published step; raises NotRun if the formulas do not describe it."""
    model, strategy, batch = row["model"], row["strategy"], row["batch"]
    if strategy.get("tp", 1) > 1:
        raise NotRun("splits matrices over ranks, which is not estimated")
    if row["grade"] == "C":
        raise NotRun("doubtful: its source contradicts itself")
    name = next(ours for start, ours in _STRATEGIES if strategy["kind"].startswith(start))
    chip = _chip(row["hardware"].get("gpu"))
    compute = str(row["dtype"].get("compute") or "bf16").partition(" ")[0]  # not stated: its commands have bfloat16
    products, element_bytes = _PRODUCTS[compute]
    checkpointing = str(row.get("activation_checkpointing") or "none").partition(" ")[0]
    workload = transformer(
        model.get("vocab") or model["classes"], model["seq_len"], model["d_model"], model["layers"], model["heads"],
        model["ffn_hidden"],
        is_flash="flash" in str(row.get("attention")),
        checkpointing=checkpointing if checkpointing in ("selective", "full") else "none",
        kv_heads=model["kv_heads"], num_matrices=3 if "SwiGLU" in model["ffn_type"] else 2,
        is_tied=bool(model.get("tied_embeddings")), is_causal=model["family"] == "decoder LM",
    )  # fmt: skip
    return Run(
        workload, chip, products, _network(row, chip), row["hardware"]["gpus"],
        batch["per_gpu_micro_batch"] * model["seq_len"], batch["micro_batches"], name,
        strategy.get("bucket_cap_mb", 25), element_bytes, 2 if row["dtype"].get("reduce") == "bf16" else 4,
        row.get("compile") is not False, param_bytes=element_bytes,
    )  # fmt: skip


def _chip(gpu: str | None) -> Chip:
    name, rate = next(((name, rate) for part, name, rate in _GPUS if gpu and part in gpu), _UNNAMED_GPU)
    return as_measured(replace(CHIPS[name], memory_bytes_per_s=rate or CHIPS[name].memory_bytes_per_s))


def _network(row: Row, chip: Chip) -> Network:
    """Curves of the chip, or two assumed numbers; where the GPU is not named, the source's own collectives."""
    hardware = row["hardware"]
    if "gpu" not in hardware:
        table = next(one for one in read("collectives") if one["id"] == row["collective_table"])
        times = tuple((float(num_bytes), us * 1e-6) for num_bytes, us in table["rows"])
        return Network(table["largest_busbw_GBps"], curves={"all-reduce": {table["ranks"]: times}}, source=table["id"])
    per_host = hardware["gpus_per_host"]
    given = hardware.get("network_gbps_per_host") or hardware.get("network_gbps_per_host_implied_not_stated")
    return _of_chip(chip, hardware["hosts"], per_host, given / 8 / per_host if given else chip.host_link_gb_per_s)


def _of_chip(chip: Chip, hosts: int, per_host: int, speed: float) -> Network:
    # What was measured of an A100 or H200 itself is among the published tables.
    return measured(Target(chip, hosts, per_host).spec, host_gb_per_s=speed, without_own=True)


def predict_collectives(say: Say) -> Iterator[dict[str, Any]]:
    """Rows of tables whose links the package knows, by size, from 1 MiB up."""
    for table in read("collectives"):
        gpu, common = table.get("gpu"), {"table": COLLECTIVES, "source": table["id"], "num_ranks": table["ranks"]}
        if not gpu or "NVLS off" in str(table.get("algorithm")):
            why = "NVLS is off" if gpu else "not a GPU's NVLink, or a GPU that is not named"
            yield common | {"check": f"{NOT_RUN}{why}"}
            continue
        kind = table["op"].replace("_", "-")
        # 1600 Gbit/s a host; its own table in jaxddp/network/measured_collectives.json is not used.
        network, group = _of_chip(_chip(gpu), table["hosts"], table["gpus_per_host"], 25), range(table["ranks"])
        for num_bytes, us in (row for row in table["rows"] if row[0] >= MIB):
            predicted = network.seconds(kind, num_bytes, group) * 1e6
            yield common | {
                "collective": kind, "size_bytes": num_bytes, "published_us": us, "predicted_us": predicted,
                "ratio": predicted / us, "note": network.assumed(kind, num_bytes, group), "check": "ok",
            }  # fmt: skip


def predict_steps(say: Say) -> Iterator[dict[str, Any]]:
    """Each published step with the estimate, or why there is none."""
    for row in read("steps"):
        common = {
            "table": STEPS, "source": row["id"], "grade": row["grade"], "published_ms": row["step_ms"],
            "num_ranks": row["hardware"]["gpus"], "repository": row["source"].get("repo", ""),
        }  # fmt: skip
        try:
            run = run_of(row)
        except NotRun as reason:
            yield common | {"check": f"{NOT_RUN}{reason}"}
            continue
        found = estimate(run)
        yield common | _alike(row) | {
            "strategy": run.strategy, "predicted_ms": found.step_s * 1e3, "exposed_ms": found.exposed_s * 1e3,
            "ratio": found.step_s * 1e3 / row["step_ms"], "check": "ok",
        }  # fmt: skip


def simulate_steps(say: Say) -> Iterator[dict[str, Any]]:
    """Published steps whose model is ours, with the commonest batch, as XLA compiles them for the same GPUs."""
    ours = [row for row in read("steps") if row["grade"] == "A" and row["model"]["name"] == "CS336-2025 xl"]
    batch_size, done = statistics.mode(row["batch"]["global_batch"] for row in ours), set()
    for row in ours:
        run = run_of(row)
        sizes = tuple(row["model"][name] for name in ("vocab", "seq_len", "d_model", "layers", "heads", "ffn_hidden"))
        bucket_mb, target = run.bucket_mb if run.strategy == "bucketed" else None, f"{run.chip.name}:{run.num_ranks}"
        setup = sizes, batch_size, run.strategy, bucket_mb, target
        if row["batch"]["global_batch"] != batch_size or run.strategy not in STRATEGIES or setup in done:
            continue
        done.add(setup)
        say(f"{row['id']}: compiling for {target}")
        found = Ranks(1, "simulated").run(simulate, setup, in_jax=True, say=say)
        yield found | {
            "table": COMPILED, "source": row["id"], "num_ranks": run.num_ranks, "strategy": run.strategy,
            "published_ms": row["step_ms"], "ratio": found["predicted_ms"] / row["step_ms"],
        }  # fmt: skip


def simulate(ranks: Ranks, setup: tuple[Any, ...]) -> dict[str, Any]:
    """Compiles a step in true float32, and simulates it; runs in a process of its own."""
    import jax

    from jaxddp.instruments.inspect import inspect, transformer_training
    from jaxddp.models import TransformerConfig

    sizes, num_sequences, strategy, bucket_mb, target = setup
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    made = transformer_training(TransformerConfig(*sizes), num_sequences)
    chosen = strategy if bucket_mb is None else bucketed(bucket_mb)
    (one,) = inspect(made.loss_fn, made.optimizer, made.params, made.batch, chosen, target=target)
    return {
        "predicted_ms": one.simulation.step_s * 1e3, "exposed_ms": one.simulation.exposed_s * 1e3,
        "check": "ok" if one.as_planned else f"{WRONG}compiled to other collectives than planned",
    }  # fmt: skip


def _alike(row: Row) -> dict[str, str]:
    """What two steps share whose times show how training scales, or in which order strategies are."""
    batch, keys = row["batch"], ("model", "dtype", "attention", "activation_checkpointing", "compile")
    conditions = [row["source"].get("repo"), row["hardware"].get("gpu"), *(row.get(key) for key in keys)]
    conditions += [batch.get("per_gpu_micro_batch"), batch.get("micro_batches")]
    kind = {key: value for key, value in row["strategy"].items() if key not in ("dp", "fsdp")}
    return {"conditions": json.dumps(conditions), "kind": json.dumps(kind)}


def scores(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The scores, as the module has them."""

    def score(name: str, values: Sequence[float], form: str, wanted: float = math.inf) -> dict[str, Any]:
        middle = statistics.median(values) if values else math.nan
        return {
            "table": SCORES, "score": name, "count": len(values), "value": format(middle, form),
            "wanted": "" if wanted == math.inf else format(wanted, form),
            "check": "ok" if middle <= wanted else f"{WRONG}above what is wanted",
        }  # fmt: skip

    collectives, steps, compiled = (
        [row for row in rows if row.get("ratio") and row["table"] == table] for table in (COLLECTIVES, STEPS, COMPILED)
    )
    logs = [(row["source"], abs(math.log(row["ratio"]))) for row in collectives]
    yield score("collectives, abs ln (predicted / published)", [apart for _, apart in logs], ".3f", 0.15)
    for source in dict.fromkeys(source for source, _ in logs):
        yield score(f"  {source}", [apart for other, apart in logs if other == source], ".3f")
    apart_of = list(scaling(steps))
    yield score("scaling, percentage points of efficiency", [apart for _, apart in apart_of], ".1f", 5.0)
    for family in ("mpt", "vitg14", "titan"):
        yield score(f"  {family}", [apart for source, apart in apart_of if source.startswith(family)], ".1f")
    for grade, wanted in (("A", 0.25), ("B", math.inf)):
        errors = [abs(row["ratio"] - 1) for row in steps if row["grade"] == grade]
        yield score(f"steps of grade {grade}", errors, ".0%", wanted)
    if compiled:
        yield score("steps compiled and simulated", [abs(row["ratio"] - 1) for row in compiled], ".0%")
    for family in ("bsnider", "damek"):
        right = [is_right for name, is_right in orders(steps) if name.startswith(family)]
        yield score(f"order of strategies, {family}", right, ".0%") | {"value": f"{statistics.fmean(right):.0%}"}


def scaling(steps: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """Sources whose GPUs are more than the fewest alike, and how far the predicted efficiency is from the published."""
    for group in by(steps, "conditions", "kind").values():
        first = min(group, key=lambda row: row["num_ranks"])
        for row in group:
            if row["num_ranks"] > first["num_ranks"]:
                published = first["published_ms"] / row["published_ms"]
                predicted = first["predicted_ms"] / row["predicted_ms"]
                yield row["source"], 100 * abs(predicted - published)


def orders(steps: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """Pairs of strategies under one condition that are clearly apart, and whether the prediction has their order."""
    for group in by(steps, "conditions", "num_ranks").values():
        for one, other in itertools.combinations(group, 2):
            published = math.log(one["published_ms"] / other["published_ms"])
            if one["kind"] != other["kind"] and abs(published) > _APART:
                yield one["source"], (published > 0) == (one["predicted_ms"] > other["predicted_ms"])


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """Predicted over published, by source."""
    figure, axes = new_figure("Predicted over published", num_columns=2, height=4.2)
    shown = [dict(row) | {"family": row["source"].partition("-")[0]} for row in rows if row.get("ratio")]
    for axis, table, key, group in (
        (axes[0][0], STEPS, "published_ms", "family"),
        (axes[0][1], COLLECTIVES, "size_bytes", "source"),
    ):
        for (name,), some in by([row for row in shown if row["table"] == table], group).items():
            axis.plot([row[key] for row in some], [row["ratio"] for row in some], "o", markersize=3, label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="published ms" if table == STEPS else "bytes", title=table)
        axis.set_yticks(_TICKS, [f"{tick:.0%}" for tick in _TICKS])
        axis.set_yticks([], minor=True)
        axis.legend(fontsize=6)
    yield figure


def cases(options: Options) -> list[Case]:
    """Collectives, then steps."""
    found = {COLLECTIVES: predict_collectives, STEPS: predict_steps, COMPILED: simulate_steps}
    return [Case(name, predict) for name, predict in found.items() if name != COMPILED or not options.quick]


_HEAD = (Column("GPUs", "num_ranks"), Column("strategy"), Column("published", "published_ms", "ms"))
BENCHMARK = Benchmark(
    "published", "what the planner's formulas give for times that others published", ("quick",), cases,
    lambda case, say: case.setup(say),
    {
        SCORES: (Column("score"), Column("rows", "count"), Column("median", "value"), Column("wanted"), CHECK),
        STEPS: (
            Column("source"), Column("grade"), *_HEAD, Column("predicted", "predicted_ms", "ms"),
            Column("exposed", "exposed_ms", "ms"), Column("predicted / published", "ratio", "", percent), CHECK,
        ),
        COMPILED: (
            Column("source"), *_HEAD, Column("simulated", "predicted_ms", "ms"), Column("exposed", "exposed_ms", "ms"),
            Column("simulated / published", "ratio", "", percent), CHECK,
        ),
        COLLECTIVES: (
            Column("source"), Column("collective"), Column("GPUs", "num_ranks"), Column("size", "size_bytes", "", size),
            Column("published", "published_us", "us"), Column("predicted", "predicted_us", "us"),
            Column("predicted / published", "ratio", "", percent), CHECK, Column("assumed", "note"),
        ),
    },
    plot, scores,
)  # fmt: skip
