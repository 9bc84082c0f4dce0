"""``inspect --trace``: where the time of a profile went, and how its collectives compare with a network."""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from ..instruments.collectives import in_bytes
from ..instruments.trace import read_trace
from ..network import KINDS, Network
from ..planning.machine import network_in_words, network_of, target
from ..table import paragraph, table

_DEVICE_HEADS = ("device", "span\nms", "compute\nms", "comm\nms", "exposed\nms")
_KIND_HEADS = ("kind", "events", "all of them\nms")
_HEADS = ("collective", "size", "ranks", "times", "median\nus", "shortest\nus", "curve\nus", "shortest\n/ curve")
_LEGEND = (
    "Compute: while anything but a collective runs; exposed: communication without it. Curve: what the network takes "
    "for one; a collective's time includes the wait for the last rank, so the shortest is held against it"
)


def show_trace(arguments: argparse.Namespace) -> None:
    """Reads the profile and prints tables or one JSON object; writes the file for ``--network-file`` if asked."""
    network, words = _network(arguments)
    trace = read_trace(arguments.trace)
    kinds, devices, collectives = trace.kinds(), trace.overlaps(), trace.collectives()
    if not collectives:
        said = ", ".join(f"{time_us / 1e3:.4g} ms of {kind}" for kind, (_, time_us) in kinds.items())
        raise ValueError(f"profile (={arguments.trace}) must hold collectives: it has {said}")
    if arguments.write_network is not None:
        path = Path(arguments.write_network)
        if path.exists():
            raise ValueError(f"write_network (={path}) must not exist: nothing is overwritten")
        path.write_text(json.dumps({"source": arguments.trace, "us": trace.curves()}, indent=1) + "\n")
    rows = [_row(*key, times_us, network) for key, times_us in collectives.items()]
    found = {
        "devices": {device: one._asdict() for device, one in devices.items()},
        "kinds": {kind: {"events": count, "us": us} for kind, (count, us) in kinds.items()},
        "collectives": rows,
        "network": words,
        "notes": [*trace.notes, *sorted({row.pop("assumed") for row in rows} - {""})],
    }
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{arguments.trace}\n")
    print(table(_DEVICE_HEADS, [[name, *(f"{us / 1e3:.3f}" for us in one)] for name, one in devices.items()]))
    print(f"\n{table(_KIND_HEADS, [[kind, f'{count:,}', f'{us / 1e3:.3f}'] for kind, (count, us) in kinds.items()])}\n")
    print(table(_HEADS, [_cells(row) for row in rows]))
    print(paragraph(f"\n{_LEGEND}. {words[:1].upper()}{words[1:]}."))
    for note in found["notes"]:
        print(paragraph(f"note: {note}"))


def _network(arguments: argparse.Namespace) -> tuple[Network | None, str]:
    """What ``--target`` and ``--network-file`` say; nothing if neither is given."""
    if arguments.target is None and arguments.network_file == "measured":
        raise ValueError("network_file (=measured) must come with --target, whose chip was measured")
    if arguments.target is None and arguments.network_file is None:
        return None, "no network: --target or --network-file would give the curve"
    machine = target(arguments.target or "h100:8")  # of which a file replaces all that is used here
    given = {"latency_us": arguments.latency_us, "file": arguments.network_file}
    network = network_of(machine, arguments.network_gb_per_s, **given)
    return network, network_in_words(machine, network)


def _row(
    kind: str, num_bytes: int | None, num_ranks: int | None, times_us: list[float], network: Network | None
) -> dict[str, Any]:
    asked: Any = kind, num_bytes, range(num_ranks or 0)
    is_known = None not in (num_bytes, num_ranks) and kind in KINDS
    curve_us = network.seconds(*asked) * 1e6 if network and is_known else None
    return {
        "kind": kind, "bytes": num_bytes, "ranks": num_ranks, "times": len(times_us), "median_us": median(times_us),
        "shortest_us": min(times_us), "curve_us": curve_us,
        "assumed": network.assumed(*asked) if network and curve_us else "",
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    shortest, curve = row["shortest_us"], row["curve_us"]
    return [
        row["kind"], "?" if row["bytes"] is None else in_bytes(row["bytes"]), str(row["ranks"] or "?"),
        f"{row['times']:,}", f"{row['median_us']:,.1f}", f"{shortest:,.1f}", f"{curve:,.1f}" if curve else "-",
        f"{shortest / curve:.2f}" if curve else "-",
    ]  # fmt: skip
