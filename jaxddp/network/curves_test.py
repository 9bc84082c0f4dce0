import json
import math

import pytest

from jaxddp.comparison_test import refusal
from jaxddp.network import Network, from_file, measured
from jaxddp.network.curves import HOST_LATENCY_US, _at_size
from jaxddp.network.tables import _MEASURED
from jaxddp.network.tables_test import output

S = 10**9
ONE, HOSTS = Network(50, latency_us=15), Network(400, latency_us=15, host_gb_per_s=50, devices_per_host=8)


def test_times_by_hand():
    for network, kind, group, latencies, by_hand_s in (
        (ONE, "all-reduce", range(2), 1, 2 * 1 / 2 * S / 50e9), (ONE, "all-reduce", range(3), 1, 2 * 2 / 3 * S / 50e9),
        (ONE, "reduce-scatter", range(3), 0.5, 2 / 3 * S / 50e9), (ONE, "all-gather", range(3), 0.5, 2 / 3 * S / 50e9),
        (ONE, "all-to-all", range(3), 0.5, 2 / 3 * S / 50e9), (ONE, "ragged-all-to-all", (1, 2), 0.5, S / 2 / 50e9),
        (ONE, "collective-permute", (3, 1), 0.5, S / 50e9), (ONE, "collective-broadcast", range(8), 0.5, S / 50e9),
        (ONE, "all-reduce", (17,), 0, 0),
        # Over hosts: within each first, then between them.
        (HOSTS, "all-reduce", range(32), 1, 2 * 7 / 8 * S / 400e9 + 2 * 3 / 4 * (S / 8) / 50e9),
        (HOSTS, "all-gather", range(32), 0.5, 7 / 8 * S / 400e9 + 3 / 4 * (S / 8) / 50e9),
        (HOSTS, "all-reduce", range(8, 16), 1, 2 * 7 / 8 * S / 400e9),
        (HOSTS, "all-reduce", (3, 11, 19, 27), 1, 2 * 3 / 4 * S / 50e9),
        # From rank to rank: at both levels at once. The last rank of each host sends to the other.
        (HOSTS, "all-to-all", range(16), 0.5, S / 2 / 50e9), (HOSTS, "all-to-all", range(8), 0.5, 7 / 8 * S / 400e9),
        (HOSTS, "collective-permute", (7, 8), 0.5, S / 50e9), (HOSTS, "collective-permute", (6, 7), 0.5, S / 400e9),
        (HOSTS, "send", range(16), 0.5, S / 50e9),
    ):  # fmt: skip
        # The same handful of products and sums, each rounded by at most 1.1e-16 of it, in another order.
        assert network.transfer_s(kind, S, group) == pytest.approx(by_hand_s, rel=1e-15, abs=0)
        assert network.seconds(kind, 0, group) == pytest.approx(latencies * 15e-6)
        assert network.seconds(kind, S, group) == pytest.approx(latencies * 15e-6 + by_hand_s, rel=1e-15)


def test_bytes_by_level():
    network = Network(450, host_gb_per_s=50, devices_per_host=4)
    assert network.sent_bytes("all-gather", 800, range(8)) == (600, 100)  # a quarter each, of which half is here
    assert network.sent_bytes("all-reduce", 800, range(4)) == (1200, 0)
    assert network.sent_bytes("all-reduce", 800, (1, 5)) == (0, 800)
    # Uneven hosts: the one rank alone on its host sends all but its own part to the other.
    assert HOSTS.sent_bytes("all-to-all", 90, (0, 1, 8)) == (30, 60)
    assert HOSTS.sent_bytes("all-to-all", 512, range(16)) == (224, 256)


@pytest.mark.parametrize(
    ("name", "value"), [("gb_per_s", 0), ("host_gb_per_s", math.inf), ("latency_us", -1), ("devices_per_host", 0)]
)
def test_numbers_out_of_range(name, value):
    assert f"{name} (={value}) must be a " in refusal(Network, **{"gb_per_s": 50, name: value})


MIB = 2**20
ROWS = {"all-reduce": {"4": [[MIB, 100.0], [16 * MIB, 400.0]], "8": [[MIB, 200.0], [16 * MIB, 800.0]]}}


@pytest.fixture
def file(tmp_path):
    def write(content, name="network.json"):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path / name

    return write


def test_a_measured_size_is_the_table_and_others_lie_between_in_logarithms(file):
    network = from_file(file({"us": ROWS}))
    assert network.seconds("all-reduce", 16 * MIB, range(8)) == pytest.approx(800e-6)
    assert network.seconds("all-reduce", 4 * MIB, range(8)) == pytest.approx(400e-6)  # half of the way in both
    assert network.seconds("all-reduce", 32 * MIB, range(8)) == pytest.approx(1600e-6)  # at the last rate
    assert network.seconds("all-reduce", 16 * MIB, range(6)) == pytest.approx(400e-6 * 2 ** math.log2(1.5))
    assert network.gb_per_s == pytest.approx(2 * 7 / 8 * 16 * MIB / 800e-6 / 1e9)
    assert network.latency_us == pytest.approx(200 - 800 / 16)  # without the bytes
    assert network.seconds("all-reduce", S, (3,)) == 0
    assert network.seconds("all-reduce", 0, range(8)) == pytest.approx(200e-6)


def test_a_smaller_buffer_takes_no_longer(file):
    """The first row of a run is often that of a communicator that was not warm."""
    rows = [[1024, 160.0], [MIB, 30.0], [2 * MIB, 31.0], [4 * MIB, 29.0], [MIB, 50.0], [16 * MIB, 90.0]]
    network = from_file(file({"us": {"all-reduce": {"8": rows}}}))
    for size, us in ((1024, 29), (MIB, 29), (4 * MIB, 29), (16 * MIB, 90)):
        assert network.seconds("all-reduce", size, range(8)) == pytest.approx(us * 1e-6)


def test_what_is_assumed_is_said(file):
    network = from_file(file({"us": ROWS}))
    assert network.assumed("all-reduce", 4 * MIB, range(8)) == "" == Network(50).assumed("send", 1, range(8))
    for kind, num_bytes, ranks, said in (
        ("all-reduce", 32 * MIB, 8, "extrapolated"), ("all-reduce", 1, 8, "extrapolated"),
        ("all-reduce", MIB, 6, "with 4, 8 ranks, not with 6"), ("send", MIB, 2, "send was not measured"),
    ):  # fmt: skip
        assert said in network.assumed(kind, num_bytes, range(ranks))


def test_hosts_send_to_each_other_while_their_ranks_do():
    network, alone = measured("h100:4x8", host_gb_per_s=25), measured("h100:8")
    assert network.seconds("all-reduce", MIB, range(8)) == alone.seconds("all-reduce", MIB, range(8))
    floor_s, within_s = HOST_LATENCY_US * 1e-6, alone.seconds("all-reduce", MIB, range(8))
    assert network.seconds("all-reduce", MIB, range(32)) == pytest.approx(within_s + floor_s)  # 8 us between hosts
    large = 2**30
    assert network.seconds("all-reduce", large, range(32)) == pytest.approx(2 * 3 / 4 * large / 8 / 25e9 + floor_s)
    assert network.seconds("all-gather", large, range(32)) == pytest.approx(31 / 32 * large / 8 / 25e9 + floor_s)
    assert "between hosts was not measured: 25 GB/s and 50 us" in network.assumed("all-reduce", MIB, range(32))
    assert network.seconds("all-reduce", MIB, (0, 8)) == network.latency_us * 1e-6 + MIB / 25e9


def test_a_measured_fabric_has_its_table_and_grows_with_its_hosts():
    two, eight = (measured(f"h100:{hosts}x8", fabric="a3mega") for hosts in (2, 8))
    assert two.seconds("all-reduce", 2**30, range(16)) == pytest.approx(6759e-6)
    assert two.assumed("all-reduce", 2**30, range(16)) == "" != two.assumed("reduce-scatter", 2**30, range(16))
    assert two.seconds("reduce-scatter", 2**30, range(16)) == two.seconds("all-gather", 2**30, range(16))
    assert eight.seconds("all-reduce", 2**30, range(64)) == pytest.approx(6759e-6 * (7 / 8) / (1 / 2))
    assert "was measured over 2 hosts, not over 8" in eight.assumed("all-reduce", 2**30, range(64))


def test_what_was_not_measured_is_refused():
    assert "must be one of all-reduce" in refusal(measured("h100:8").seconds, "all_reduce", 2**20, range(8))
    assert "must be left out with 'a3mega'" in refusal(measured, "h100:2x8", fabric="a3mega", host_gb_per_s=25)
    found = refusal(measured, "h100:2x4", fabric="a3mega")
    assert found.startswith("fabric (='a3mega') must be one that was measured with 'h100:2x4'")
    assert refusal(measured, "v5p:8").startswith("chip (='v5p') must be one whose collectives were measured: b200")
    assert refusal(measured, "h100:4x8").startswith("host_gb_per_s must be given for 'h100:4x8'")
    for spec in ("h100:32", "h100"):
        assert refusal(measured, spec).startswith(f"spec (='{spec}') must have 1 to 8 devices on a host")


@pytest.mark.parametrize(("chip", "least"), [("a100", 0.15), ("h200", 0.2)])
def test_a_chip_of_which_little_was_measured_takes_the_rest_from_another(chip, least):
    """Without its own table, half of the sizes from 1 MiB up are within what that left open: 15 or 20 %."""
    own, taken = measured(f"{chip}:8"), measured(f"{chip}:8", without_own=True)
    sizes = [MIB << power for power in range(14)]
    errors = sorted(abs(taken.seconds("all-reduce", size, range(8)) / own.seconds("all-reduce", size, range(8)) - 1)
                    for size in sizes)  # fmt: skip
    assert 0 < errors[len(errors) // 2] < least
    for ranks, kind in ((8, "all-gather"), (4, "all-reduce")):
        assert own.seconds(kind, MIB, range(ranks)) == taken.seconds(kind, MIB, range(ranks))
    gather = measured("h100:8").seconds("all-gather", (1.5 if chip == "a100" else 1) * 2**30, range(8))
    assert own.seconds("all-gather", 2**30, range(8)) == pytest.approx(gather, rel=0.01)  # between two sizes


@pytest.mark.parametrize("chip", ["h100", "b200", "gb200", "gb300"])
def test_a_size_left_out_of_nvidias_table_is_found_between_its_neighbours(chip):
    """From 1 MiB up, half within 5 % and four of five within 15 %: these are single runs, whose neighbours scatter."""
    errors = []
    for by_ranks in json.loads(_MEASURED.read_text())["us"][chip].values():
        for rows in by_ranks.values():
            large = [(size, us) for size, us in rows if size >= MIB]
            for left, (size, us), right in zip(large, large[1:], large[2:], strict=False):
                errors.append(abs(_at_size((left, right), size) / us - 1))
    errors.sort()
    assert errors[len(errors) // 2] < 0.05 and errors[int(0.8 * len(errors))] < 0.15


def test_a_run_of_the_collectives_benchmark_is_read(file):
    rows = [
        {"collective": "all_gather", "num_ranks": 4, "size_bytes": size, "median_ms": ms, "check": check}
        for size, ms, check in ((MIB, 0.2, "ok"), (4 * MIB, 0.4, "ok"), (4 * MIB, 0.1, "WRONG: sums"))
    ]
    path = file("\n".join(map(json.dumps, rows)), "metrics.jsonl")
    assert from_file(path).curves == from_file(path.parent).curves
    assert from_file(path).seconds("all-gather", 4 * MIB, range(4)) == pytest.approx(0.4e-3)


REDUCES = (
    "1048576        262144     float     sum      -1    29.97   34.99   34.99      0    29.89   35.08   35.08      0",
    "67108864      16777216     float     sum      -1   312.40  214.82  214.82      0   310.83  215.90  215.90      0",
    "134217728      33554432     float     sum      -1     1.00  214.82  214.82      3   310.83  215.90  215.90      0",
)


def test_what_nccl_tests_print_is_read(file):
    printed = "\n".join(output("all_reduce_perf", 2, *REDUCES))
    network = from_file(file(printed, "log.txt"))
    assert network.seconds("all-reduce", 64 * MIB, range(2)) == pytest.approx(312.4e-6)  # out of place
    assert network.seconds("all-reduce", MIB, range(2)) == pytest.approx(29.97e-6)
    assert network.seconds("all-reduce", 128 * MIB, range(2)) == pytest.approx(624.8e-6)  # wrong sums are no time
    two_hosts = printed.replace("node-01 device  1", "node-02 device  0")
    assert "its ranks are on 2 hosts" in refusal(from_file, file(two_hosts, "two.txt"))


def test_what_nccl_tests_write_as_json_is_read(file):
    def line(size, time_us, wrong=0):
        return {"size": size, "type": "float", "out_of_place": {"time": time_us, "nwrong": wrong}, "in_place": None}

    # Without MPI it names the first of a process alone.
    devices = [{"rank": 0, "hostname": "node-01", "device": 0, "device_info": "NVIDIA H100"}]
    written = {
        "args": ["/opt/build/all_reduce_perf", "-g", "8"],
        "config": {"nthreads": 1, "ngpus": 8, "devices": devices},
        "results": [line(MIB, 50.5), line(2 * MIB, 60.0), line(4 * MIB, 1.0, wrong=3)],
        "out_of_bounds": {"count": 0},
    }
    network = from_file(file(written, "out.json"))
    assert network.curves == {"all-reduce": {8: ((MIB, pytest.approx(50.5e-6)), (2 * MIB, pytest.approx(60e-6)))}}
    found = refusal(from_file, file({"args": [], "results": []}, "cut.json"))
    assert found.endswith("must hold measured collectives: KeyError('config')")


def test_a_file_that_is_no_table_is_one_line(file):
    for content, said in (
        ({"us": {"all-reduce": {"8": [[MIB, 1.0]]}}}, "must have several sizes, with times that grow"),
        ({"us": {"all-reduce": {"8": [[1, 1.0], [2, math.nan], [3, 2.0]]}}}, "must have several sizes, with times"),
        ({"us": {"all-reduce": {"8": [[MIB, 2.0], [2 * MIB, 1.0]]}}}, "must have several sizes, with times that grow"),
        ({"us": {"all-reduce": {"8": [[MIB, 5e-5], [2**30, 5e-3]]}}}, "times must be microseconds"),
        ({"us": {"all-reduce": {"8": [["1M", 5.0], ["2M", 7.0]]}}}, "must hold measured collectives"),
        ({"us": {"dance": {"8": [[MIB, 2.0]]}}}, "it has none"),
        ("# nThread 1", "must be what nccl-tests printed"),
        ('{"us": ', "must hold measured collectives: JSONDecodeError"),
    ):
        assert said in refusal(from_file, file(content))
