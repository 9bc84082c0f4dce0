"""Sizes that do not fit are refused or left out before anything starts; the forecast is corrected as it goes."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxddp
from benchmarks.collectives.cases import NAMES, brought_length
from benchmarks.collectives.forecast import Forecast, assumed_network, forecast_s
from benchmarks.collectives.interleaving import Batch
from benchmarks.collectives.jax_side import mapped
from benchmarks.collectives.sizes import (
    GIB,
    HELD,
    KIB,
    MIB,
    QUICK_SIZES,
    SIZES,
    asked_sizes,
    check_fit,
    fitting,
    launches,
    needed_bytes,
)
from benchmarks.harness.free_memory import PROCESS_BYTES, free_bytes
from benchmarks.harness.ranks import Ranks


def test_sizes_are_by_powers_of_four_from_1_kib_to_1_gib_or_as_asked():
    assert asked_sizes(None, quick=False) == SIZES and (SIZES[0], SIZES[1], SIZES[-1]) == (KIB, 4 * KIB, GIB)
    assert asked_sizes(None, quick=True) == QUICK_SIZES and max(QUICK_SIZES) == 16 * MIB
    assert asked_sizes((10, 0.5, 10), quick=True) == (MIB // 2, 10 * MIB)
    with pytest.raises(ValueError, match=r"^sizes_mb \(=0.0001\) must be at least 1 KiB, 0.000976562 MiB$"):
        asked_sizes((1, 0.0001), quick=False)


def test_all_ranks_share_the_machines_memory():
    held = int(HELD["all_reduce"] * 64 * MIB)
    assert needed_bytes("all_reduce", 64 * MIB, Ranks(4, "processes")) == 4 * (held + PROCESS_BYTES)
    assert needed_bytes("all_reduce", 64 * MIB, Ranks(4, "simulated")) == 4 * held + PROCESS_BYTES
    assert needed_bytes("all_reduce", 64 * MIB, Ranks(4, "gpus")) == held
    # Six ranks cannot share 64 MiB evenly: beside it they bring a buffer that they can.
    assert needed_bytes("all_reduce", 64 * MIB, Ranks(6, "gpus")) == held + 64 * MIB


def test_what_does_not_fit_is_left_out_and_says_what_it_needs():
    ranks = Ranks(2, "gpus")
    names = ("all_reduce", "reduce_scatter")
    batches, left_out = fitting(names, (MIB, GIB), ranks, free=6 * GIB)
    assert batches == (Batch(GIB, ("all_reduce",)), Batch(MIB, ("all_reduce", "reduce_scatter")))  # largest first
    assert left_out == [("reduce_scatter", GIB, "reduce_scatter of 1 GiB needs 8.0 GiB, 5.7 can be had")]
    batches, left_out = fitting(("all_reduce",), (MIB, GIB), ranks, free=5 * GIB)  # a twentieth is left alone
    assert batches == (Batch(MIB, ("all_reduce",)),) and len(left_out) == 1
    _, left_out = fitting(("all_reduce", "reduce_scatter"), (GIB,), ranks, free=4 * GIB)
    why = "1 GiB needs 5.0 GiB, 3.8 can be had"  # at the least: one reason for all
    assert left_out == [("all_reduce", GIB, why), ("reduce_scatter", GIB, why)]


def test_what_does_not_fit_together_is_run_apart():
    names = ("all_reduce", "reduce_scatter")
    batches, left_out = fitting(names, (MIB, 4 * MIB, GIB), Ranks(2, "gpus"), free=10 * GIB)
    alone = [Batch(GIB, (name,)) for name in names]
    shared = (Batch(4 * MIB, names), Batch(MIB, names))
    assert batches == (*alone, *shared) and not left_out
    assert launches(batches) == [(alone[0],), (alone[1],), shared]
    assert launches(alone) == [(alone[0],), (alone[1],)] and launches(shared) == [shared]


def test_sizes_at_which_nothing_fits_are_refused():
    ranks = Ranks(2, "gpus")
    check_fit(("all_reduce", "reduce_scatter"), (MIB, GIB), ranks, free=6 * GIB)
    message = (
        r"sizes_mb \(=1024, 2048\) must fit into memory: with 2 ranks 1 GiB needs at least 5.0 GiB, 1.9 can be had"
    )
    with pytest.raises(ValueError, match=rf"^{message}$"):
        check_fit(("all_reduce", "reduce_scatter"), (MIB, GIB, 2 * GIB), ranks, free=2 * GIB)


def test_free_memory_is_some_of_what_there_is():
    assert 64 * MIB < free_bytes("processes") < 2**50


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_counted_as_held_covers_what_xla_lays_out(num_ranks):
    mesh, spec, size_bytes = jaxddp.data_mesh(num_ranks), PartitionSpec("data"), 4 * MIB
    for name in NAMES:
        length = num_ranks * brought_length(name, size_bytes, num_ranks)
        given = jax.ShapeDtypeStruct((length,), "float32", sharding=NamedSharding(mesh, spec))
        laid_out = jax.jit(mapped(mesh, name)).lower(given).compile().memory_analysis()
        outputs = laid_out.output_size_in_bytes + laid_out.temp_size_in_bytes
        inputs = size_bytes + size_bytes / num_ranks  # there is one of either length, whichever is at work
        assert outputs + inputs <= HELD[name] * size_bytes, name


def test_the_forecast_is_corrected_by_what_was_wrong_so_far():
    one, two = Batch(1, ()), Batch(2, ())
    forecast = Forecast({("a", two): 10.0, ("a", one): 10.0, ("b", two): 30.0, ("c", two): 40.0})
    assert str(forecast) == "90 s"
    forecast.done("a", two, seconds=30.0)
    assert str(forecast) == "4 min"  # 80 s, and it was wrong by three
    forecast.skip("c")
    assert str(forecast) == "2 min"
    forecast.done("a", two, seconds=10.0)  # again, in other processes
    assert str(forecast) == "3 min"


def test_a_rank_that_begins_with_a_size_makes_a_line(monkeypatch):
    now_s = iter([0.0, 5.0, 25.0, 40.0])
    monkeypatch.setattr("benchmarks.collectives.forecast.time.monotonic", lambda: next(now_s))
    large, small = Batch(4 * MIB, ("reduce",)), Batch(MIB, ("reduce",))
    forecast, shown = Forecast({("a", large): 10.0, ("a", small): 10.0}), []
    on_message = forecast.follow("a", lambda rank, message: shown.append((rank, message)))
    on_message(0, ("size", large))
    on_message(1, ("size", large))
    on_message(0, ("size", small))
    assert shown[0] == (0, ("doing", "4 MiB, about 20 s left"))
    assert shown[2] == (0, ("doing", "1 MiB, about 25 s left"))  # 10 s, and the first took 25 in the place of 10
    assert on_message.under_way == small
    on_message(0, ("found", None))
    assert str(forecast) == "0 s" and on_message.under_way is None


def test_a_size_that_takes_long_makes_a_line_a_round():
    batch, shown = Batch(4 * MIB, ("reduce",)), []
    on_message = Forecast({}).follow("a", lambda rank, message: shown.append(message))
    for message in [("size", batch), ("rounds", 0, 0), ("rounds", 0, 5), ("rounds", 0, 5), ("rounds", 1, 5)]:
        on_message(0, message)
    lines = [said for kind, said, *_ in shown if kind == "doing"]
    assert lines[1:] == ["4 MiB, warming up", "4 MiB, 0 of 5 rounds", "4 MiB, 1 of 5 rounds"]


def test_a_size_is_forecast_from_the_assumed_network():
    batch = Batch(64 * MIB, ("all_reduce", "send_recv"))
    # Two calls of 0.5 ms and 64 MiB at 0.5 GB/s each; two rounds to warm up and five timed ones.
    assert forecast_s(batch, Ranks(2, "processes"), 5, 1.0) == pytest.approx(7 * 2 * (0.0005 + 64 * MIB / 0.5e9))
    assert forecast_s(batch, Ranks(2, "gpus"), None, 3.0) < forecast_s(batch, Ranks(2, "processes"), None, 3.0)


@pytest.mark.parametrize(("link_mbit", "gb_per_s"), [(1000.0, 0.125), (10_000.0, 0.5)])
def test_in_a_lab_no_more_is_forecast_than_its_links_let_through(link_mbit, gb_per_s, monkeypatch):
    monkeypatch.setattr("benchmarks.collectives.forecast.network", lambda: {"link_mbit": link_mbit})
    assert assumed_network(Ranks(2, "lab")).gb_per_s == gb_per_s
    assert assumed_network(Ranks(2, "processes")).gb_per_s == 0.5
