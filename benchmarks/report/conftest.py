"""Rows as the benchmarks write them, from small factories, and a whole run of them in a folder."""

import json
import math

import pytest

from benchmarks.soak.faults import KILL, STOP
from benchmarks.soak.goodput import PARTS
from jaxddp.planning.cost.bandwidth import bus_factor

HOSTILE = "</script><script>alert(1)</script><img src=http://127.0.0.1/x onerror=alert(2)>"
ENVELOPE = {
    "part": "2 ranks", "commit": "0123abc", "command": "python -m benchmarks all", "machine": "x86_64", "cores": 2,
    "measured_at": "2026-01-02 03:04:05 +0000", "system": "Linux", "python": "3.11.7", "check": "ok",
}  # fmt: skip
BACKENDS = {"jaxddp": "XLA in-process", "torchref": "Gloo"}
VERSIONS = {"jaxddp": {"jax": "0.10.2"}, "torchref": {"torch": "2.13.0"}}


def row(benchmark, **fields):
    return {"benchmark": benchmark, **ENVELOPE, **fields}


def timed(median_ms, spread=0.05):
    return {"median_ms": median_ms, "p10_ms": median_ms * (1 - spread), "p90_ms": median_ms * (1 + spread)}


def of(framework, num_ranks=2):
    kind = {"jaxddp": "simulated", "torchref": "processes"}[framework]
    return {
        "framework": framework, "backend": BACKENDS[framework], "num_ranks": num_ranks, "kind": kind, "device": "cpu",
        "ranks": f"{num_ranks} {kind}", "versions": VERSIONS[framework],
    }  # fmt: skip


def step(benchmark, framework, strategy, median_ms, exposed_ms=None, bucket_mb=None, num_ranks=2, **fields):
    measured = of(framework, num_ranks) | timed(median_ms) | {"strategy": strategy, "bucket_mb": bucket_mb}
    plan = [["all-reduce", 4096]] * 3
    return row(benchmark, **measured, exposed_ms=exposed_ms, planned=plan, compiled=plan, loss=2.5, **fields)


def steps(benchmark="main", **fields):
    """Seven strategies in both frameworks, every one faster than the last."""
    names = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")
    return [
        step(benchmark, framework, name, base - 20 * index, 40.0 - 6 * index, 4.0 if index in (3, 4, 5) else None,
             max_weight_difference=1e-5, params_bytes=2**24, **fields)
        for framework, base in (("jaxddp", 300.0), ("torchref", 330.0))
        for index, name in enumerate(names)
    ]  # fmt: skip


def traces():
    """A step of naive, whose communication comes after its computation, and one of overlapped, where it does not."""

    def events(first_reduction_ms):
        compute = [("forward", 0, 20), ("backward", 20, 60), ("optimizer", 80, 90)]
        sent = [(first_reduction_ms + 10 * index, first_reduction_ms + 10 * index + 8) for index in range(2)]
        return [
            *({"lane": "device 0", "name": name, "phase": name, "start_ms": s, "end_ms": e} for name, s, e in compute),
            *({"lane": "network", "name": "sum", "phase": "all-reduce", "start_ms": s, "end_ms": e} for s, e in sent),
        ]  # fmt: skip

    return [
        row("strategies", **of(framework), strategy=name, trace=events(first), overlap_share=share, communication_ms=16)
        for framework in BACKENDS
        for name, first, share in (("naive", 60, 0.0), ("overlapped", 30, 0.75))
    ]


def collectives():
    rows = []
    for framework in BACKENDS:
        for num_ranks in (2, 4):
            for name in ("all_reduce", "reduce_scatter", "all_gather"):
                for size_bytes in (2**10, 2**14, 2**20, 10 * 2**20, 100 * 2**20):
                    seconds = 2e-4 * num_ranks + size_bytes / (2e9 / num_ranks)
                    algbw = size_bytes / seconds / 1e9
                    rows.append(
                        row("collectives", **of(framework, num_ranks), **timed(seconds * 1e3, 0.2), collective=name,
                            size_bytes=size_bytes, algbw_gb_per_s=algbw, busbw_gb_per_s=algbw * 1.5, kernel="")
                    )  # fmt: skip
                fit = {
                    "alpha_us": 200.0 * num_ranks, "alpha_low_us": 150.0 * num_ranks,
                    "alpha_high_us": 250.0 * num_ranks, "gb_per_s": 1.9, "gb_per_s_low": 1.1,
                    "gb_per_s_high": None if num_ranks == 4 else 6.9, "worst_error": 0.07, "num_sizes": 5,
                    "bus_gb_per_s": 1.9 * float(bus_factor(name, num_ranks)),
                }  # fmt: skip
                rows.append(row("collectives", **of(framework, num_ranks), collective=name, **fit))
    return rows


def buckets():
    """A sweep whose best cap is 10 MiB, beside a prediction that says 5."""
    rows = []
    for framework in BACKENDS:
        for cap in (1.0, 5.0, 10.0, 25.0, 100.0):
            fields = {
                "predicted_ms": 100 + 10 * abs(math.log(cap / 5)),
                "predicted_sd_ms": 1.5,
                "simulated_ms": 99.0,
                "simulated_sd_ms": 2.5,
                "regime": "compute-bound",
            }
            rows.append(step("buckets", framework, "bucketed", 100 + 20 * abs(math.log(cap / 10)), 20.0, cap, **fields))
        best = {"optimum_mb": 5.0, "measured_optimum_mb": 10.0, "as_good_mb": [10.0, 25.0], "uniform_optimum_mb": 4.0}
        rows.append(
            row("buckets", **of(framework), **best, regime="compute-bound") | {"check": "off: 10 MiB is better"}
        )
    return rows


def memory():
    rows = []
    for index, name in enumerate(("bucketed", "zero1", "zero3")):
        for moment, more in (("after init", 0), ("before the update", 800), ("after the step", 300)):
            held = {"parameters": 600 - 150 * index, "optimizer_state": 1200 - 300 * index, "activations": more,
                    "gradients": more // 4, "buckets": more // 8, "batch": 0}  # fmt: skip
            held = {key: value * 2**20 for key, value in held.items()}
            formula = sum(held.values()) + (more and 2**20)
            fields = {"model": "seed_xl", "target": "h100:2", "allocated": None, "compiled": held, "formula": formula}
            rows.append(row("memory", strategy=name, moment=moment, **fields) | {"check": "+0.1%" if more else "ok"})
    figure = {"name": "baseline, after init", "says_mib": 654.659, "corrected": None, "here": 1800 * 2**20,
              "why": "optax makes the moments at once"}  # fmt: skip
    return [*rows, row("memory", figure=figure), row("memory", strategy="zero3", allocator="cpu devices count none")]


def gates():
    def gate(name, ratio, limit, check="ok"):
        fields = {"ratio": ratio, "low": ratio - 0.04, "high": ratio + 0.04, "limit": limit, "num_rounds": 20}
        return row("gates", name=name, **fields) | {"check": check}

    return [
        gate("jaxddp bucketed / jit with replicated parameters", 1.02, 1.05),
        gate("torchref bucketed / DistributedDataParallel", 1.21, 1.10, "MISSED"),
        gate("for information: jaxddp / torch", 2.00, math.inf, "-"),
        step("gates", "jaxddp", "bucketed", 500.0, None, 25.0),
    ]


def compilation():
    rows = [
        row("compile", curve=curve, size=size, target="h100:8", planned=3,
            seconds={part: [[size**0.9 / 50 + 0.1, size**0.9 / 40 + 0.2]] * 3 for part in ("trace", "compile", "read")})
        for curve, sizes in (("devices", (8, 64, 512)), ("parameters", (10, 100, 1000, 3000)))
        for size in sizes
    ]  # fmt: skip
    return [*rows, row("compile", fitted=0.9, last=1.02) | {"part": "trace and compile"}]


def scaling():
    return [
        row("scaling", **of("jaxddp", num_ranks), **timed(100 * num_ranks**0.2), strategy="bucketed", mode=mode,
            how=how, efficiency=num_ranks**-slope)
        for mode in ("strong", "weak")
        for how, slope in (("measured", 0.3), ("simulated", 0.1))
        for num_ranks in (1, 2, 4, 8)
    ]  # fmt: skip


def fault(kind, side="jaxddp", back_s=10.0, **fields):
    return row("soak", side=side, fault=kind, step=30, noticed_s=0.5, ended_s=2.0, back_s=back_s, steps_lost=4, lines=3,
               left_behind="nothing") | fields  # fmt: skip


def whole_soak(side="jaxddp", **fields):
    """100 seconds with a goodput of 60 %."""
    parts = dict(zip(PARTS, (60.0, 10.0, 0.0, 5.0, 5.0, 10.0, 10.0), strict=True))
    return row("soak", side=side, num_ranks=2, minutes=100 / 60, num_faults=3, goodput=0.6, parts_s=parts, step=600,
               max_weight_difference=0.0, disk="a tmpfs") | fields  # fmt: skip


def soak():
    used = {"lived_s": 300.0, "memory_mib": 650.0, "memory_mib_growth": 0.1, "handles": 20, "threads": 40}
    return [fault(KILL), fault(STOP), whole_soak(), row("soak", side="jaxddp", role="rank 0", **used)]


def in_lab(rows, link_mbit=1000.0):
    """Rows as the same benchmark writes them in a lab."""
    of_hosts = {"kind": "hosts", "link_mbit": link_mbit}
    backends = {"XLA in-process": {"backend": "XLA over Gloo"}}
    return [one | of_hosts | backends.get(one.get("backend"), {}) for one in rows]


def links(link_mbit=1000.0):
    """A lab's link as it was measured, and what ran in the lab."""
    found = {"asked_mbit": link_mbit, "rate_mbit": 0.957 * link_mbit, "p10_mbit": 0.9 * link_mbit,
             "p90_mbit": 0.96 * link_mbit, "round_trip": timed(0.05), "congestion_control": "cubic"}  # fmt: skip
    rows = [row("lab", **found, line="link: as asked") | {"part": "link 1"}, row("lab") | {"part": "buckets"}]
    return [one | {"link_mbit": link_mbit} for one in rows]


def unsound(benchmark):
    """What did not work out, one of each kind."""
    wrong = step(benchmark, "jaxddp", "naive", 123.456, 10.0, 7.0)
    return [
        wrong | {"check": "WRONG: weights differ by more than 1e-03"},
        row(benchmark, **of("torchref"), strategy="fully_shard") | {"check": "FAILED: rank 1 of 2 failed: no network"},
        row(benchmark) | {"check": "not run: there is no GPU"},
    ]


def write_run(folder, **benchmarks):
    """Writes rows by benchmark, each into a folder as ``all`` does, or the lab into its own, and returns the folder."""
    for name, rows in benchmarks.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


def write_full_run(folder):
    """Writes all experiments, one that nobody knows, a lab, rows that did not work out, and lines that hold no row."""
    write_run(
        folder, main=steps() + unsound("main"), strategies=[*steps("strategies"), *traces(),
        step("strategies", "jaxddp", "jit", 210.0), step("strategies", "torchref", "DistributedDataParallel", 250.0)],
        collectives=collectives(), buckets=buckets(), memory=memory(), gates=gates(), compile=compilation(),
        scaling=scaling(), soak=soak(), races=[row("races", name=HOSTILE, nested={"a": [1, 2]}, **timed(3.0))],
    )  # fmt: skip
    link, *ran = links()
    write_run(folder, lab=ran)
    write_run(folder / "lab", link=[link], buckets=in_lab(buckets()), collectives=in_lab(collectives()))
    with (folder / "main" / "metrics.jsonl").open("a") as lines:
        lines.write('{"benchmark": "main", "str\n')
    return folder


@pytest.fixture(scope="session")
def full_run(tmp_path_factory):
    """A folder with a whole run in it."""
    return write_full_run(tmp_path_factory.mktemp("runs") / "20260102-030405-all")
