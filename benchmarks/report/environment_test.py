"""The environment of a run: said once where all agree, and by whom where they do not."""

from benchmarks.report.conftest import of, row
from benchmarks.report.environment import differences, facts, render_environment
from benchmarks.report.runs import RunRows


def run(**changes):
    return RunRows("a", [row("main", **of("jaxddp")), row("main", **of("torchref")) | changes])


def test_facts():
    said = facts(run(measured_at="2026-01-02 04:00:00 +0000"))
    assert said == {
        "command": ["python -m benchmarks all"],
        "commit": ["0123abc"],
        "machine": ["x86_64, Linux, 2 cores"],
        "device": ["cpu"],
        "ranks": ["jaxddp: 2 simulated, XLA in-process", "torchref: 2 processes, Gloo"],
        "versions": ["jax 0.10.2, python 3.11.7, torch 2.13.0"],
        "measured": ["2026-01-02 03:04:05 +0000 to 2026-01-02 04:00:00 +0000"],
    }
    assert "<dt>machine</dt><dd>x86_64, Linux, 2 cores</dd>" in render_environment(run())


def test_gpus_driver_and_variables_are_facts_where_there_are_any():
    here = {"driver": "580.65", "gpus": ["NVIDIA H200"] * 2, "variables": {"NCCL_ALGO": "Ring"}}
    said = facts(RunRows("a", [row("main", **here)]))
    assert said["GPUs"] == ["2 x NVIDIA H200, driver 580.65"]
    assert said["variables"] == ["NCCL_ALGO=Ring"]
    assert differences(RunRows("a", [row("main")]), RunRows("b", [row("main", **here)])) == [
        "GPUs (not said / 2 x NVIDIA H200, driver 580.65)",
        "variables (not said / NCCL_ALGO=Ring)",
    ]


def test_gpus_that_are_no_names_are_left_out():
    assert facts(RunRows("a", [row("main", gpus=[[0, 0], {}, "NVIDIA H200"])]))["GPUs"] == ["1 x NVIDIA H200"]


def test_who_says_what_is_named_where_benchmarks_differ():
    both = RunRows("a", [row("main", device="cpu"), row("gates", device="H200"), row("gates")])
    assert facts(both)["device"] == ["cpu (main)", "H200 (gates)"]
    assert facts(both)["commit"] == ["0123abc"]


def test_a_lab_is_told_from_what_ran_outside_of_it():
    rows = [row("buckets", device="a"), row("buckets", device="b", link_mbit=1000.0)]
    said = facts(RunRows("a", rows))
    assert said["device"] == ["a (buckets)", "b (buckets at 1000 Mbit/s)"]
    assert said["links of the lab"] == ["1000 Mbit/s"]


def test_a_machine_that_was_not_all_there_is_named():
    rows = [row("gates", stolen_share=0.31), row("gates", stolen_share=0.12), row("buckets", stolen_share=0.02)]
    said = facts(RunRows("a", rows))
    assert said["not got"] == ["up to 31% of the processors' time went to others by this machine's host"]


def test_differences_are_of_what_both_measured():
    assert differences(run(), run(measured_at="later")) == []
    assert differences(run(), run(commit="fffffff")) == ["commit (0123abc / 0123abc; fffffff)"]
    alone = RunRows("b", [*run().rows, row("gates", machine="aarch64")])
    assert differences(run(), alone) == []
    in_lab = [row("main", machine="aarch64", link_mbit=1000.0)]
    assert differences(RunRows("a", [*run().rows, *in_lab]), run()) == []
