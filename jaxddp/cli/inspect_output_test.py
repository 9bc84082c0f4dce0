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
    assert lines[0].startswith("model on h100:8, in tf32, simulated; network, assumed: 50 GB/s a device as given")
    split = [re.split(r"\s{2,}", line.strip()) for line in lines]
    rows = {cells[0]: cells for cells in split if len(cells) > 10}
    for each in both:
        overlap, simulation = each.schedule.overlap(), each.simulation
        in_flight, late = overlap.bytes_in_flight / overlap.num_bytes, overlap.bytes_started_after_backward
        shares = overlap.first_start_fraction, in_flight, late / overlap.num_bytes
        times = simulation.compute_s, simulation.communication_s, simulation.exposed_s, simulation.step_s
        assert rows[each.strategy][2:] == [
            f"{len(each.compiled)} AR", "-" if each.strategy == "auto" else "ok", f"{overlap.num_bytes / 2**20:.1f}",
            *(f"{share:.0%}" for share in shares),
            *(f"{seconds * 1e3:.4f}" for seconds in times),  # the longest step, of 0.44 ms, has four figures
            f"{simulation.step_s / each.bound.step_s:.3f}", "4.5",
        ]  # fmt: skip


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
