"""What nccl-tests printed, of several releases, programs and launchers."""

import pytest

from jaxddp.network.tables import nccl_tests_rows


def output(program, num_ranks, *lines, names_itself=True):
    ranks = (
        f"#  Rank  {rank} Group  0 Pid  27523 on   node-01 device  {rank} [0000:0{rank}:00] NVIDIA H100 80GB HBM3"
        for rank in range(num_ranks)
    )
    first = [f"# Collective test starting: {program}"] if names_itself else []
    return [
        *first,
        "# nThread 1 nGpus 4 minBytes 1024 maxBytes 67108864 step: 65536(factor) warmup iters: 5 iters: 20",
        "#",
        "# Using devices",
        *ranks,
        "node-01:27523:27523 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>",
        "#   size      count      type   redop    root     time   algbw   busbw #wrong    time  algbw  busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
        *lines,
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 118.955",
        "#",
    ]  # fmt: skip


SMALL = "        1024            64     float    none      -1    12.31    0.08    0.06      0    12.28  0.08  0.06  0"
LARGE = (
    "    67108864       4194304      half    none      -1   212.40  315.96  236.97    N/A   210.83  318.31 238.73 N/A"
)
GATHERS = output("all_gather_perf", 4, SMALL, LARGE)


def read(name, lines):
    return nccl_tests_rows("\n".join(lines), name)


def test_a_file_has_a_line_for_each_size():
    small, large = read("out.txt", GATHERS)
    assert small == ("all_gather", 4, 1024, 12.31 * 1e-6)
    assert large == ("all_gather", 4, 2**26, 212.4 * 1e-6)


def test_older_releases_do_not_name_themselves():
    older = output("broadcast_perf", 4, SMALL, names_itself=False)
    (small,) = read("broadcast_perf.log", older)
    assert small[0] == "broadcast"


@pytest.mark.parametrize("names_itself", [True, False], ids=["announced", "echoed by the shell"])
def test_a_file_of_two_programs_has_the_lines_of_each(names_itself):
    size = 8 * 2**30
    line = f"{size} 2147483648 float sum -1 85899.3 100.0 175.0 0 85899.3 100.0 175.0 0"
    reduces = output("all_reduce_perf", 8, line, names_itself=names_itself)
    gathers = output("all_gather_perf", 2, line, names_itself=names_itself)
    echo = [] if names_itself else ["+ ./all_reduce_perf -b 8G", "+ ./all_gather_perf -b 8G"]
    lines = [*echo[:1], *reduces, *echo[1:], *gathers]
    assert [row[:3] for row in read("x", lines)] == [("all_reduce", 8, size), ("all_gather", 2, size)]


def test_what_has_no_time_or_no_counterpart_is_left_out():
    nothing = SMALL.replace("1024 ", "   0 ")
    exchanges, hypercubes = (output(f"{name}_perf", 2, LARGE) for name in ("alltoall", "hypercube"))
    lines = output("all_gather_perf", 4, nothing, SMALL) + hypercubes + exchanges
    found = read("all_gather_perf.log", lines)
    assert [row[:3] for row in found] == [("all_gather", 4, 1024), ("all_to_all", 2, 2**26)]


@pytest.mark.parametrize(
    "prefix",
    ["[1,0]<stdout>:", "[1,0]<stdout>: ", "0: ", "  ", "\t", "2026-01-02 03:04:05 ", "2026-01-02T03:04:05.123Z ",
     "[2026-01-02T03:04:05,123+01:00] ", "03:04:05 ", "0: 2026-01-02 03:04:05.5 "],
)  # fmt: skip
def test_lines_behind_what_launchers_and_logs_put_before_them(prefix):
    assert read("x", [prefix + line for line in GATHERS]) == read("y", GATHERS)


NO_SIZES = [line for line in GATHERS if line not in (SMALL, LARGE)]


@pytest.mark.parametrize("lines", [["no GPU"], ["# all_reduce_perf", SMALL], GATHERS[1:], NO_SIZES])
def test_another_file_is_refused(lines):
    with pytest.raises(ValueError, match=r"^it must be what nccl-tests printed, with the name of its "):
        read("x.txt", lines)
