import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxddp import targets
from jaxddp.cli.inspect import as_json, show
from jaxddp.instruments.inspect import Inspection
from jaxddp.instruments.simulate import Bound, simulate
from jaxddp.instruments.testdata import schedule_of
from jaxddp.network import Network

TARGET = targets.target("h100:8")


def inspection(strategy, network=None, **changes):
    """A step of the fixtures as if it had been compiled from a model just now."""
    schedule, network = schedule_of(f"gpu-{strategy}-jax0.12"), network or Network(50, 15)
    simulation = simulate(schedule, TARGET.chip, network)
    memory = {"parameters": 28_992, "peak": 4_460_000_000, "available": 80_000_000_000}
    bound = Bound(simulation.compute_s, 1e-6, 1e-6, 17e-6)
    planned = schedule.gradient_collectives()
    found = Inspection(strategy, TARGET, network, planned, schedule, simulation, bound, memory)
    return dataclasses.replace(found, **changes)


@pytest.fixture
def both():
    return [inspection("bucketed"), inspection("naive"), inspection("auto", planned=[])]


@pytest.fixture
def shown(capsys, monkeypatch):
    def printed(inspections, width=160, folder=None):
        monkeypatch.setenv("COLUMNS", str(width))
        show(inspections, "model", folder)
        return capsys.readouterr().out

    return printed


def test_a_row_holds_what_the_schedule_and_the_simulation_say(both, shown):
    lines = shown(both).splitlines()
    network = "network, assumed: 50 GB/s a device as given, 15 us a call"
    assert lines[0] == f"model on h100:8, in tf32, simulated; {network}"
    assert lines[1] == "rates, assumed: published peaks of products and memory"
    split = [re.split(r"\s{2,}", line.strip()) for line in lines]
    rows = {cells[0]: cells for cells in split if len(cells) > 10}
    heads = rows["strategy"]
    assert heads == "strategy planned compiled check volume first in late compute comm exposed step step peak".split()
    for each in both:
        row = rows[each.strategy]
        overlap, simulation = each.schedule.overlap(), each.simulation
        count = f"{len(each.compiled)} AR"
        is_auto = each.strategy == "auto"
        assert row[1:4] == ["-" if is_auto else count, count, "-" if is_auto else "ok"]
        assert row[4] == f"{overlap.num_bytes / 2**20:.1f}"
        in_flight = f"{overlap.bytes_in_flight / overlap.num_bytes:.0%}"
        late = f"{overlap.bytes_started_after_backward / overlap.num_bytes:.0%}"
        assert row[5:8] == [f"{overlap.first_start_fraction:.0%}", in_flight, late]
        times = (simulation.compute_s, simulation.communication_s, simulation.exposed_s, simulation.step_s)
        # The longest step, of 0.44 ms, has four figures.
        assert row[8:12] == [f"{seconds * 1e3:.4f}" for seconds in times]
        assert row[12:] == [f"{simulation.step_s / each.bound.step_s:.3f}", "4.5"]


def test_the_bound_and_the_pictures_are_below(both, shown):
    output = shown(both, folder=Path("runs/here"))
    assert "\nNo schedule can beat the bound, " in output
    assert output.endswith("\nruns/here: timeline.png\n")
    assert "runs/here" not in shown(both)


@pytest.mark.parametrize("width", [160, 80])
def test_nothing_is_cut_at_any_width(both, width, shown):
    output = shown(both, width)
    lines = output.splitlines()
    assert max(map(len, lines)) <= width
    assert {f"{each.simulation.exposed_s * 1e3:.4f}" for each in both} <= set(output.split())
    assert any(line.split() == ["bucketed", "naive", "auto"] for line in lines) == (width < 120)  # turned


def test_what_was_not_compiled_as_planned_stands_out(both, shown):
    output = shown([dataclasses.replace(both[1], planned=both[1].planned[1:])])
    assert "NOT AS PLANNED" in output and "\nnaive: compiled to other collectives than planned\n" in output
    output = shown([inspection("bucketed", Network(450, 15, host_gb_per_s=12.5, devices_per_host=4))])
    assert "between hosts 12.5 GB/s as given" in output


def test_json_holds_plain_values(both):
    found = as_json(both)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [each["strategy"] for each in found["compare"]] == ["naive", "auto"]
    assert found["planned"] == [{"kind": kind, "bytes": num_bytes} for kind, num_bytes in both[0].planned]
    assert (found["exposed_ms"], found["memory"]) == (both[0].simulation.exposed_s * 1e3, both[0].memory)
