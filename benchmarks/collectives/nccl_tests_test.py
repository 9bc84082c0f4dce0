"""Rows of nccl-tests: of programs, replaced by one that prints what they do, and of files."""

import pytest

from benchmarks.collectives import nccl_tests
from benchmarks.collectives.benchmark import describe
from benchmarks.collectives.section import section
from benchmarks.harness.options import Options

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
    assert found["in_a_row_us"] == 29.97
    # This project counts as nccl-tests does, which rounds to two digits.
    assert (found["algbw_gb_per_s"], found["busbw_gb_per_s"]) == pytest.approx((34.99, 61.23), abs=0.005)
    assert found["check"] == "ok" and failed["check"].startswith("FAILED: ") and "exit status 3" in failed["check"]


def test_they_stand_in_the_table(programs):
    made = section(list(nccl_tests.rows(programs, (2**20,), 8)))
    table = next(part for part in made.parts if getattr(part, "caption", None) == "Calls by collective and size")
    assert len(table.rows) == 1 and any("nccl-tests" in note for note in made.notes)


FILE = """\
# Collective test starting: all_gather_perf
# nThread 1 nGpus 4 minBytes 1024 maxBytes 67108864 step: 65536(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  27523 on   node-01 device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  27523 on   node-01 device  1 [0000:0a:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  27523 on   node-01 device  2 [0000:44:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  27523 on   node-01 device  3 [0000:5a:00] NVIDIA H100 80GB HBM3
node-01:27523:27523 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024            64     float    none      -1    12.31    0.08    0.06      0    12.28    0.08    0.06      0
    67108864       4194304      half    none      -1   212.40  315.96  236.97    N/A   210.83  318.31  238.73    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 118.955
#
"""


def test_a_file_has_a_row_for_each_size_beside_ours(tmp_path):
    (path := tmp_path / "out.txt").write_text(FILE)
    small, large = nccl_tests.read_file(str(path))
    assert {(row["collective"], row["num_ranks"], row["device"]) for row in (small, large)} == {
        ("all_gather", 4, "NVIDIA H100 80GB HBM3")
    }
    assert [row["dtype"] for row in (small, large)] == ["float32", "float16"]
    assert (large["size_bytes"], large["in_a_row_us"], large["check"]) == (2**26, 212.4, "ok")
    assert (large["algbw_gb_per_s"], large["busbw_gb_per_s"]) == pytest.approx((315.96, 236.97), abs=0.005)
    assert small["busbw_gb_per_s"] == pytest.approx(1024 / 12.31e-6 / 1e9 * 3 / 4)
    (table,) = (
        part for part in section([small, large]).parts if getattr(part, "caption", "").startswith("Calls by collective")
    )
    assert len(table.rows) == 2
    # Older releases do not print the program's name, and an error in place of a count.
    older = FILE.partition("\n")[2].replace("0    12.28", "1e-07    12.28").replace("none      -1", "none       0")
    (path := tmp_path / "broadcast_perf.log").write_text(older)
    small, _ = nccl_tests.read_file(str(path))
    assert (small["collective"], small["check"]) == ("broadcast", "ok")
    assert small["busbw_gb_per_s"] == small["algbw_gb_per_s"]
    path.write_text(older.replace("values : 0 OK", "values : 3 FAILED"))
    assert {row["check"] for row in nccl_tests.read_file(str(path))} == {"WRONG: 3 values of the file"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no GPU", "has not the name of its program"),
        ("# all_reduce_perf", "has not a line for each rank"),
        (FILE.partition("        1024")[0], "has no line of a size"),
    ],
)
def test_another_file_is_refused_before_anything_is_measured(text, said, tmp_path):
    (path := tmp_path / "out.txt").write_text(text)
    with pytest.raises(ValueError, match=rf"^file '.*out.txt' must be what nccl-tests printed, and {said}$"):
        describe(Options(quick=True, nccl_tests=(str(path),)))


@pytest.mark.parametrize(
    ("wrong", "check"), [("0", "ok"), ("N/A", "ok"), ("30", "WRONG: 30 values")], ids=["right", "not checked", "wrong"]
)
def test_wrong_values_are_said(wrong, check):
    assert nccl_tests.read(f"8 2 float sum -1 1.0 2.0 3.0 {wrong} 1.0 2.0 3.0 0", "all_reduce", 2)["check"] == check


def test_other_output_is_refused():
    with pytest.raises(ValueError, match=r"^nccl-tests printed 0 lines of sizes, not 1: 'no GPU'$"):
        nccl_tests.read("no GPU", "all_reduce", 2)
