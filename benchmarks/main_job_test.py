"""The main job from end to end, on the tiny model."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from benchmarks.main_job import STRATEGIES, run_main_job, text_setup
from benchmarks.measure import Setup, StrategySpec
from jaxddp.data import RandomTokens


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of two rounds on two ranks; its folder, what it printed and what it returned."""
    # The same batch twice, and enough steps, so that the loss must fall.
    batches = (RandomTokens(64, 16).batch(0, 8),) * 6
    strategies = (StrategySpec("naive"), StrategySpec("bucketed", 0.01))
    setup = Setup("tiny", strategies, 2, batches, num_warmup=1, learning_rate=1e-2)
    folder, output = tmp_path_factory.mktemp("run"), io.StringIO()
    holds = run_main_job(folder, Console(file=output, width=200, highlight=False), setup)
    return folder, output.getvalue(), holds


def test_every_check_holds(finished):
    _, output, holds = finished
    assert holds, output


def test_every_row_is_complete_and_stands_alone(finished):
    folder, _, _ = finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["framework"], row["strategy"]) for row in rows] == [
        ("jaxddp", "naive"), ("jaxddp", "bucketed"), ("torchref", "naive"), ("torchref", "bucketed"),
    ]  # fmt: skip
    for row in rows:
        assert row["check"] == "ok"
        assert row["num_ranks"] == 2
        assert row["params_bytes"] == 7248 * 4
        assert sum(num_bytes for _, num_bytes in row["compiled"]) == 7248 * 4
        assert (row["global_batch"], row["microbatch"]) == (8, 4)
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert np.isfinite(row["exposed_ms"])
        assert row["loss"] < row["first_loss"]
        assert row["versions"] and row["command"].startswith("python -m benchmarks")


def test_the_table_and_the_picture_are_written(finished):
    folder, output, _ = finished
    table = (folder / "table.md").read_text()
    for words in (
        "| jaxddp | bucketed 0.01 MiB | 2 simulated |",
        "| torchref | naive | 2 processes |",
        "| 21 AR | 21 AR |",
    ):
        assert words in table
    assert "single-process JAX against single-process PyTorch" in output
    assert (folder / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_job_compares_all_strategies_from_the_same_batches():
    setup, described = text_setup(num_ranks=2, num_steps=3, batch_size=4, data=None)
    assert [spec.name for spec in STRATEGIES] == [
        "naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3",
    ]  # fmt: skip
    assert setup.num_timed == 3
    assert setup.batches[0]["tokens"].shape == (4, 128)
    assert "standard library" in described
    with pytest.raises(ValueError, match=r"batch_size \(=5\) must be divisible by the number of ranks \(=2\)"):
        text_setup(num_ranks=2, num_steps=3, batch_size=5, data=None)
