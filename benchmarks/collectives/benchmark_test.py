"""The benchmark of collectives from end to end on two ranks of each backend that there is without GPUs."""

import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

import jaxddp
from benchmarks.collectives import jax_side, part, sizes
from benchmarks.collectives.benchmark import describe, run
from benchmarks.collectives.cases import NAMES, QUICK_NAMES, brought_length, check, size_of
from benchmarks.collectives.fit import network_of
from benchmarks.collectives.interleaving import Timed
from benchmarks.collectives.part import BackendPart, CollectivesSetup, rows_of
from benchmarks.collectives.section import section
from benchmarks.collectives.sizes import GIB, KIB, MIB
from benchmarks.harness.options import Options
from benchmarks.harness.ranks import Ranks, num_gpus
from benchmarks.harness.run import Run
from jaxddp import targets
from jaxddp.instruments.targets import start_compile_for_target
from torchref.launch import RankError

SIZES = (KIB, 16 * KIB, 256 * KIB)
PARTS = (
    BackendPart("jaxddp", Ranks(2, "simulated")),
    BackendPart("jaxddp", Ranks(2, "processes")),
    BackendPart("torchref", Ranks(2, "processes")),
    BackendPart("torchref", Ranks(2, "gpus"), "no GPU"),
)
SETUP = CollectivesSetup(PARTS, NAMES, SIZES, num_rounds=5, budget_s=1.0)
BACKENDS = ("XLA in-process", "XLA over Gloo", "Gloo")


of_the_run = pytest.mark.full  # it takes half a minute; CI runs it beside the test command


class Measured(NamedTuple):
    """A run of the benchmark, what it printed, and what its ranks' processes printed."""

    holds: bool
    rows: list
    folder: Path
    printed: str
    by_ranks: str


def console():
    return Console(file=io.StringIO(), width=200, highlight=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run of everything; one of the collectives is said to fit into no memory."""
    folder = tmp_path_factory.mktemp("collectives")
    this, by_ranks = Run(folder, console(), "collectives"), folder / "by-ranks.txt"
    with pytest.MonkeyPatch.context() as patch, by_ranks.open("w") as file:
        patch.setitem(sizes.HELD, "ring_all_gather", 1e9)
        standard = [os.dup(1), os.dup(2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            holds = run(this, SETUP)
        finally:
            for number, kept in enumerate(standard, 1):
                os.dup2(kept, number)
                os.close(kept)
    return Measured(holds, this.rows, folder, this.console.file.getvalue(), by_ranks.read_text())


@of_the_run
def test_every_backend_has_a_row_for_each_collective_and_size(measured):
    timed = [row for row in measured.rows if "median_ms" in row]
    assert measured.holds and {row["check"] for row in timed} == {"ok"}
    assert Counter(row["backend"] for row in timed) == dict.fromkeys(BACKENDS, (len(NAMES) - 1) * len(SIZES))
    assert {row["threads"] for row in timed if row["framework"] == "torchref"} == {1}
    assert {row["threads"] for row in timed if row["backend"] == "XLA over Gloo"} == {1}
    for row in timed:
        assert row["size_bytes"] == row["asked_bytes"] and row["dtype"] == "float32" and row["num_ranks"] == 2
        assert row["num_rounds"] == len(row["rounds_ms"]) == 5
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["algbw_gb_per_s"] == pytest.approx(row["size_bytes"] / row["median_ms"] / 1e6)
        assert sorted(row["planned"]) == sorted(row["compiled"]) != []
        assert row["versions"].keys() == ({"jax", "jaxlib"} if row["framework"] == "jaxddp" else {"torch"})
    kinds = {(row["backend"], row["collective"]): row["compiled"][0][0] for row in timed}
    assert kinds["XLA in-process", "reduce_scatter"] == "reduce-scatter"
    for name in ("reduce_scatter", "all_gather", "reduce"):
        assert kinds["XLA over Gloo", name] == "all-reduce"
    assert kinds["Gloo", "reduce"] == "reduce" and kinds["Gloo", "ring_all_reduce"] == "send-recv"


def run_from(rows, folder, monkeypatch):
    """Goes on with a run that had these rows."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    this = Run(folder, console(), "collectives")
    holds = run(this, SETUP)
    return Measured(holds, this.rows, folder, this.console.file.getvalue(), "")


@of_the_run
def test_what_was_not_run_is_a_row_that_says_why(measured):
    missing = [row for row in measured.rows if row["check"].startswith("not run")]
    assert Counter(row["backend"] for row in missing) == {"NCCL": 1} | dict.fromkeys(BACKENDS, len(SIZES))
    assert next(row["check"] for row in missing if row["backend"] == "NCCL") == "not run: no GPU"
    others = [row["check"] for row in missing if row["backend"] != "NCCL"]
    assert all(said.startswith("not run: ring_all_gather of ") and " GiB, " in said for said in others)
    assert "NCCL, 2 ranks: not run: no GPU" in measured.printed


@of_the_run
def test_fits_are_networks(measured):
    fits = [row for row in measured.rows if "num_sizes" in row]
    assert Counter(row["backend"] for row in fits) == dict.fromkeys(BACKENDS, len(NAMES) - 1)
    grown = [row for row in fits if row["collective"] == "all_reduce" and row["alpha_us"] is not None]
    for row in grown:
        assert network_of(measured.rows, row["framework"], 2, row["kind"]).gb_per_s == row["bus_gb_per_s"]


@of_the_run
def test_the_folder_holds_the_table_with_its_notes(measured):
    folder, printed = measured.folder, measured.printed
    table = (folder / "table.md").read_text()
    assert table.startswith("| collective | framework | backend | ranks | size | call | p10-p90 | rounds | algbw |")
    rows = [line for line in table.splitlines() if line.startswith("| ring-all-reduce |") and "| 256 KiB |" in line]
    assert [row.split(" | ")[2] for row in rows[:3]] == ["XLA over Gloo", "XLA in-process", "Gloo"]  # side by side
    assert "algbw: bytes of the full buffer over the time" in table and "times the bandwidth of Gloo" in table
    assert "| a rank sends | worst error |" in table
    assert "about" in printed and f"written to {folder}: table.md" in printed


@of_the_run
def test_ranks_print_nothing(measured):
    """Gloo would say who is connected."""
    assert measured.by_ranks == ""


@of_the_run
def test_a_run_that_was_stopped_goes_on_without_measuring_again(measured, tmp_path, monkeypatch):
    for name in ("run_jax", "run_torch"):
        monkeypatch.setattr(Ranks, name, lambda *_, **__: pytest.fail("measured again"))
    again = run_from(measured.rows, tmp_path, monkeypatch)
    assert again.holds and len(again.rows) == len(measured.rows)
    assert (tmp_path / "table.md").read_text() == (measured.folder / "table.md").read_text()
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        run_from([row for row in measured.rows if row["backend"] != "Gloo"], tmp_path, monkeypatch)


@of_the_run
def test_a_part_that_fails_is_said_and_the_others_go_on(measured, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RankError("rank 1 of 2 failed: OSError: no network")

    monkeypatch.setattr(Ranks, "run_torch", fail)
    again = run_from([row for row in measured.rows if row["backend"] != "Gloo"], tmp_path, monkeypatch)
    assert not again.holds and len(again.rows) < len(measured.rows)
    said = "Gloo, 2 ranks: FAILED: rank 1 of 2 failed: OSError: no network"
    assert said in again.printed and f"| {said.split(': ', 1)[1]} |" in (tmp_path / "table.md").read_text()


@of_the_run
def test_kernels_are_explained_where_there_are_any(measured):
    assert not any(said.startswith("kernel: ") for said in section(measured.rows).notes)
    on_gpu = next(row for row in measured.rows if "kernel" in row) | {"kernel": "TRITON_ONE_SHOT"}
    assert any(said.startswith("kernel: ") for said in section([on_gpu]).notes)


@of_the_run
def test_a_wrong_result_is_marked_everywhere(measured, tmp_path, monkeypatch):
    rows = [row | {"check": "WRONG: 7 values"} if row.get("asked_bytes") == MIB // 4 else row for row in measured.rows]
    again = run_from(rows, tmp_path, monkeypatch)
    assert not again.holds and "WRONG: 7 values" in again.printed
    wrong = [line for line in (tmp_path / "table.md").read_text().splitlines() if "| 256 KiB |" in line]
    assert wrong and all("WRONG: 7 values" in line for line in wrong)


@pytest.mark.parametrize("breaks", ["result", "program"])
def test_a_collective_that_is_wrong_is_found_out(breaks, monkeypatch):
    """Wrong values, and right ones by another way than planned."""
    instead = {"result": lambda x, axis: 2 * jaxddp.communication.collectives.send_recv(x, axis, [(0, 1), (1, 0)]),
               "program": jaxddp.communication.ring.ring_all_reduce}[breaks]  # fmt: skip
    mesh = jaxddp.data_mesh(2)
    given = jax_side._input(mesh, 256)
    right = jax_side._compiled(mesh, "all_reduce", KIB, given).timed
    assert check(right.planned, right.found, right.wrong) == "ok"
    monkeypatch.setattr(jax_side.collectives, "all_reduce", instead)
    broken = jax_side._compiled(mesh, "all_reduce", KIB, given).timed
    said = check(right.planned if breaks == "result" else broken.planned, broken.found, broken.wrong)
    assert said.startswith("WRONG: 1 all-reduce of 1,024 bytes planned, ")
    assert (broken.wrong > 0) == (breaks == "result")
    assert (check(broken.found, broken.found, broken.wrong) == "ok") == (breaks == "program")


def test_a_call_takes_as_long_as_on_its_slowest_rank_and_is_as_wrong_as_on_all():
    planned = [("all-reduce", 1000)]
    of_ranks = [
        [Timed("all_reduce", 1000, 1000, planned, planned, wrong=wrong, seconds=seconds),
         Timed("broadcast", 1000, failed="XlaRuntimeError: no")]
        for wrong, seconds in ((0, [0.1, 0.4, 0.3]), (2, [0.2, 0.3, 0.1]))
    ]  # fmt: skip
    first, second = rows_of(of_ranks, num_ranks=2)
    assert first["rounds_ms"] == [200.0, 400.0, 300.0] and first["median_ms"] == pytest.approx(300)
    assert first["check"] == "WRONG: 2 values"
    assert (second["check"], second["collective"]) == ("FAILED: XlaRuntimeError: no", "broadcast")


@pytest.fixture
def gpus(monkeypatch):
    """Gives the machine some GPUs."""

    def have(count):
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("benchmarks.harness.ranks.count_jax_gpus", lambda: count)

    return have


def keys(options):
    return [(part.key, part.why_not) for part in describe(options)[0].parts]


def test_every_backend_that_there_is_runs_with_2_4_and_6_ranks(gpus):
    gpus(0)
    setup, line = describe(Options())
    assert [part.key for part in setup.parts if not part.why_not] == [
        f"{backend}, {num_ranks} ranks" for num_ranks in (2, 4, 6) for backend in BACKENDS
    ]
    assert {part.why_not for part in setup.parts if part.ranks.kind == "gpus"} == {"no GPU"}
    assert setup.names == NAMES and setup.sizes[-1] == GIB
    assert line.startswith("9 collectives of 1 KiB to 1 GiB: XLA in-process, 2 ranks; ") and " min if a rank " in line
    assert "0.5 GB/s on CPUs" in line


def test_the_short_form(gpus):
    gpus(0)
    setup, line = describe(Options(quick=True))
    assert setup.names == QUICK_NAMES and {part.ranks.num for part in setup.parts} == {2}
    assert "about" in line and "corrected as it goes" in line
    assert [key for key, _ in keys(Options(on="simulated", ranks=3))] == ["XLA in-process, 3 ranks", "Gloo, 3 ranks"]


def test_ranks_on_gpus_are_no_more_than_there_are(gpus, monkeypatch):
    monkeypatch.setattr(part, "free_bytes", lambda kind: 8 * GIB)
    gpus(4)
    assert [key for key, _ in keys(Options(on="gpus"))] == [
        "XLA over NCCL, 2 ranks", "NCCL, 2 ranks", "XLA over NCCL, 4 ranks", "NCCL, 4 ranks",
    ]  # fmt: skip
    assert "XLA over NCCL, 4 ranks" in describe(Options(ranks=6))[1] and "4 GB/s on GPUs" in describe(Options())[1]
    with pytest.raises(ValueError, match=r"^ranks \(=6\) must be at most the number of GPUs \(=4\)$"):
        describe(Options(on="gpus", ranks=6))
    gpus(8)
    assert [key for key, _ in keys(Options(on="gpus"))][-2:] == ["XLA over NCCL, 8 ranks", "NCCL, 8 ranks"]
    assert "NCCL, 8 ranks" in dict(keys(Options())) and "Gloo, 8 ranks" not in dict(keys(Options()))
    gpus(1)
    assert ("NCCL, 2 ranks", "one GPU, and ranks need one each") in keys(Options(quick=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 1}, r"ranks \(=1\) must be at least 2: one rank has no other to communicate with"),
        ({"steps": 4}, r"steps \(=4\) must be at least 5 rounds, or the spread means nothing"),
        ({"on": "gpus"}, r"ranks of kind 'gpus' need GPUs, and torch finds none"),
        ({"sizes_mb": (1, 2**30)}, r"sizes_mb \(=1.07374e\+09\) must fit into memory: with 2 ranks 1.049e\+06 GiB "),
    ],
)  # fmt: skip
def test_bad_input(options, message, gpus):
    gpus(0)
    with pytest.raises(ValueError, match=rf"^{message}"):
        describe(Options(**options))


@pytest.mark.full
@pytest.mark.parametrize("asked_bytes", [KIB, MIB])
def test_what_gpus_run_compiles_for_them_as_planned(asked_bytes):
    mesh = targets.mesh("h100:2")
    by_rank = NamedSharding(mesh, PartitionSpec("data"))
    lengths = {name: brought_length(name, asked_bytes, 2) for name in NAMES}
    pending = {
        name: start_compile_for_target(
            targets.target("h100:2"),
            jax_side.mapped(mesh, name),
            [jax.ShapeDtypeStruct((2 * length,), "float32")],
            in_shardings=(by_rank,),
        )
        for name, length in lengths.items()
    }
    for name, one in pending.items():
        found = [(made.kind, made.num_bytes) for made in jaxddp.read_schedule(one.result()).collectives()]
        assert check(jax_side.planned(mesh, name, size_of(name, asked_bytes, 2)), found, 0) == "ok", name


@pytest.mark.gpu
def test_gpus_give_right_results_or_are_too_few(tmp_path):
    setup = CollectivesSetup(describe(Options(ranks=2))[0].parts[-2:], NAMES, (KIB, MIB), num_rounds=5, budget_s=1.0)
    assert {part.ranks.kind for part in setup.parts} == {"gpus"}
    this = Run(tmp_path, console(), "collectives")
    assert run(this, setup)
    measured = {row["backend"] for row in this.rows if row["check"] == "ok"}
    assert measured == ({"XLA over NCCL", "NCCL"} if num_gpus() > 1 else set())
