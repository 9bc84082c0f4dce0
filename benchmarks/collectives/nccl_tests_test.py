"""Rows of nccl-tests, whose programs are replaced by one that prints what they do."""

import pytest

from benchmarks.collectives import nccl_tests
from benchmarks.collectives.section import section

PRINTS = """#!/bin/sh
# Named as all_reduce_perf; ends with an error for the size 4096.
[ "$2" = 4096 ] && { echo "Test NCCL failure" >&2; exit 3; }
echo "# nThread 1 nGpus $6 minBytes $2 maxBytes $4 step: 1048576(bytes) warmup iters: 5 iters: ${10}"
echo "#  size  count  type  redop  root  time   algbw   busbw #wrong  time   algbw   busbw #wrong"
echo "  $2  262144  float  sum  -1  29.97   34.99   61.23      0    29.89   35.08   61.39      0"
echo "# Out of bounds values : 0 OK"
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    (tmp_path / "all_reduce_perf").write_text(PRINTS)
    (tmp_path / "all_reduce_perf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return nccl_tests.installed(("all_reduce", "all_gather", "ring_all_reduce"))


def test_rows_of_the_programs_that_are_installed(programs, tmp_path):
    assert programs == {"all_reduce": str(tmp_path / "all_reduce_perf")}
    found, failed = nccl_tests.rows(programs, (2**20, 4096), 8)
    assert (found["collective"], found["num_ranks"], found["size_bytes"]) == ("all_reduce", 8, 2**20)
    assert (found["in_a_row_us"], found["algbw_gb_per_s"], found["busbw_gb_per_s"]) == (29.97, 34.99, 61.23)
    # As this project counts: bytes over the time, times 2 (N-1)/N.
    assert found["algbw_gb_per_s"] == pytest.approx(2**20 / 29.97e-6 / 1e9, abs=0.005)
    assert found["busbw_gb_per_s"] == pytest.approx(found["algbw_gb_per_s"] * 2 * 7 / 8, abs=0.005)
    assert found["check"] == "ok" and failed["check"].startswith("FAILED: ") and "exit status 3" in failed["check"]


def test_they_stand_in_the_table(programs):
    made = section(list(nccl_tests.rows(programs, (2**20,), 8)))
    table = next(part for part in made.parts if getattr(part, "caption", None) == "Calls by collective and size")
    assert len(table.rows) == 1 and any("nccl-tests" in note for note in made.notes)


@pytest.mark.parametrize(
    ("wrong", "check"), [("0", "ok"), ("N/A", "ok"), ("3", "WRONG: 3 values")], ids=["right", "not checked", "wrong"]
)
def test_wrong_values_are_said(wrong, check):
    assert nccl_tests.read(f"8 2 float sum -1 1.0 2.0 3.0 {wrong} 1.0 2.0 3.0 0")["check"] == check


def test_other_output_is_refused():
    with pytest.raises(ValueError, match=r"^nccl-tests printed 0 lines of sizes, not 1: 'no GPU'$"):
        nccl_tests.read("no GPU")
