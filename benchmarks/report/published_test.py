"""The report's figures are those of its tables, and stand beside comparable ones of ours."""

from benchmarks.report.conftest import buckets, collectives, in_lab, of, row, steps, timed
from benchmarks.report.published import buckets_beside, collectives_beside, figures, strategies_beside
from jaxddp.planning.cost.bandwidth import bandwidths


def lines(table):
    return {line["figure"]: line for line in table.rows}


def test_the_reports_own_arithmetic_holds():
    for one in figures()["collectives"]:
        _, busbw = bandwidths("all_reduce", one["size_bytes"], one["mean_ms"] * 1e-3, one["num_ranks"])
        # Its tables round times to 1 us, which is 0.3 % of the shortest, and bandwidths to 1e-3.
        assert abs(busbw / 1e9 - one["busbw_gb_per_s"]) < 5e-3 * one["busbw_gb_per_s"]
    for one in figures()["strategies"]["rows"]:
        assert abs(one["step_ms"] - 267.0 - one.get("exposed_ms", one["step_ms"] - 267.0)) < 0.1
    assert figures()["provenance"]


def test_exposed_shares_stand_beside_what_is_right():
    found = lines(strategies_beside(steps()))
    overlapped = found["overlapped: exposed share"]
    assert (overlapped["says"], overlapped["right"]) == ("1.0%", "27%")
    assert overlapped["here"] == "jaxddp 11%, torchref 9.7%"  # 28 of 260 and of 290 ms
    assert "synchronise" in overlapped["why"]
    assert found["step of zero1 / bucketed"]["here"] == "jaxddp 0.92, torchref 0.93"
    assert found["step of zero1 / bucketed"]["says"] == "1.23"


def test_what_is_wrong_or_has_no_counterpart_is_not_beside_it():
    bad = [one | {"check": "WRONG: x"} for one in steps() if one["strategy"] == "naive"]
    others = [one for one in steps() if one["strategy"] == "flat"]
    assert set(lines(strategies_beside(bad + others))) == {"flat: exposed share"}
    assert strategies_beside(bad) is None


def test_all_reduces_of_the_same_size_on_as_many_ranks():
    table = collectives_beside(collectives())
    pairs = {(line["report"]["num_ranks"], line["report"]["size_bytes"] // 2**20) for line in table.rows}
    assert pairs == {(ranks, size) for ranks in (2, 4) for size in (1, 10, 100)}
    assert {line["report"]["backend"] for line in table.rows} == {"Gloo"}
    gpu = row("collectives", **of("torchref", 6), **timed(1.0), collective="all_reduce", asked_bytes=2**20)
    (line,) = collectives_beside([gpu | {"backend": "NCCL", "size_bytes": 2**20 + 8}]).rows
    assert line["report"]["mean_ms"] == 0.599
    assert collectives_beside([gpu | {"num_ranks": 3}]) is None


def test_a_lab_is_named_beside_the_source():
    assert strategies_beside(steps()).note.count("Here: cpu, XLA in-process; cpu, Gloo.") == 1
    note = strategies_beside(in_lab(steps())).note
    where = "in a lab with links of 1000 Mbit/s"
    assert f"Here: cpu, XLA over Gloo, {where}; cpu, Gloo, {where}." in note


def test_bucket_sizes_as_ratios_to_the_best():
    rows = [one for one in buckets() if "optimum_mb" not in one]
    optima = [one for one in buckets() if "optimum_mb" in one]
    found = lines(buckets_beside(rows, optima))
    assert found["step with 10 MB / best"]["here"] == "jaxddp 1.000, torchref 1.000"
    assert found["step with 10 MB / best"]["says"] == "1.038"
    assert found["best cap by formula"]["here"] == "jaxddp 4 MiB, torchref 4 MiB"
    assert "step with 1000 MB / best" not in found
    assert buckets_beside([], []) is None
