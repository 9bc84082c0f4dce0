"""The sizes of every backend: what fits into memory, what is measured and checked."""

import pytest

from benchmarks import collectives
from benchmarks.benchmark import Case
from benchmarks.collective_calls import REPLACED, torch_call
from benchmarks.collective_cases import NAMES
from benchmarks.collectives import GIB, MIB, Sweep, fitting, measure, time_sweep
from benchmarks.ranks import Ranks
from torchref.launch import shared_pool

SMALL = (1024, 4100)


def test_every_backend_with_the_ranks_of_the_assignment_report(monkeypatch):
    from benchmarks.conftest import options  # late: ranks import this file, and JAX may have started there

    names = [case.name for case in collectives.cases(options())]
    kinds = ("XLA in-process",), ("XLA over Gloo", "Gloo")
    assert names == [f"{backend}, {num} ranks" for kind in kinds for num in (2, 4, 6) for backend in kind]
    with pytest.raises(ValueError, match="needs 2 GPUs or more"):
        collectives.cases(options(on="gpus"))
    monkeypatch.setattr(collectives, "num_gpus", lambda: 8)
    monkeypatch.setattr("benchmarks.ranks.num_gpus", lambda: 8)
    on_gpus = [case.name for case in collectives.cases(options(on="gpus"))]
    assert on_gpus == [f"{backend}, {num} ranks" for num in (2, 4, 6, 8) for backend in ("XLA over NCCL", "NCCL")]


@pytest.mark.parametrize(
    ("kind", "sizes"), [("simulated", SMALL), pytest.param("processes", SMALL[1:], marks=pytest.mark.full)]
)
def test_jax_calls_are_right_on_both_kinds_of_ranks(kind, sizes):
    sweep = Sweep("jaxddp", Ranks(2, kind), NAMES, sizes, 5, 1.0)
    rows = list(measure(Case("jax", sweep), print))
    assert [(row["collective"], row["asked_bytes"]) for row in rows] == [
        (name, size) for name in NAMES for size in sizes
    ]
    for row in rows:
        assert row["check"] == "ok" and row["num_rounds"] == len(row["rounds_ms"]) == 5
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["algbw_gb_per_s"] == pytest.approx(row["size_bytes"] / row["median_ms"] / 1e6)
        replaced = kind == "processes" and row["collective"] in REPLACED
        assert (row["planned"] is None) == replaced and row["compiled"]


def wrong(ranks, name, asked_bytes):
    """A reduce that gives one value more than it should, and a gather that cannot be made."""
    if name == "all_gather":
        raise OSError("no buffer")
    call = torch_call(ranks, name, asked_bytes)
    return call._replace(run=lambda x: call.run(x) + (name == "reduce"))


def in_torch(ranks, sweep):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "torch_call", wrong)
        return time_sweep(ranks, sweep, sweep.sizes)


def test_torch_calls_are_right_and_what_is_wrong_is_marked():
    sweep = Sweep("torchref", Ranks(2, "processes"), NAMES, (1024,), 5, 1.0)
    rows, _ = shared_pool().run(in_torch, sweep.ranks, sweep, num_ranks=2)
    checks = {row["collective"]: row["check"] for row in rows}
    assert checks.pop("all_gather") == "FAILED: OSError: no buffer"
    assert checks.pop("reduce") == f"WRONG: {2 * 7 * 256:,} values"  # of both ranks, in 2 + 5 rounds
    assert set(checks.values()) == {"ok"} and len(checks) == len(NAMES) - 2


def test_sizes_that_do_not_fit_into_memory_are_left_out(monkeypatch):
    monkeypatch.setattr(collectives, "free_bytes", lambda kind: 28 * GIB)
    sizes, left_out = fitting(Sweep("torchref", Ranks(2, "processes"), NAMES, (MIB, GIB, 4 * GIB), None, 1.0))
    assert sizes == [GIB, MIB] and [asked for asked, _ in left_out] == [4 * GIB]
    assert "4 GiB needs 101.0 GiB" in left_out[0][1]
    in_job = Sweep("torchref", Ranks(8, "processes", is_job=True), NAMES, (2 * GIB,), None, 1.0)
    assert fitting(in_job) == ([2 * GIB], [])  # what is free is one rank's
