"""``inspect --trace``: where the time of a profile went, and how its collectives compare with a network."""

import argparse
import json
from pathlib import Path
from statistics import median

from ..instruments.collectives import in_bytes
from ..instruments.trace import read_trace
from ..network import KINDS, Network
from ..planning.chips import Target
from ..planning.machine import network_in_words
from ..table import paragraph, table

_DEVICE_HEADS = ("device", "span\nms", "compute\nms", "comm\nms", "exposed\nms")
_KIND_HEADS = ("kind", "events", "all of them\nms")
_HEADS = ("collective", "size", "ranks", "times", "median\nus", "shortest\nus", "curve\nus", "shortest\n/ curve")
_LEGEND = (
    "Compute: while anything but a collective runs; exposed: communication without it. Curve: what the network takes "
    "for one; a collective's time includes the wait for the last rank, so the shortest is held against it."
)


def show_trace(arguments: argparse.Namespace, machine: Target | None, network: Network | None) -> None:
    """Reads the profile and prints tables; writes the file for ``--network-file`` if asked."""
    trace = read_trace(arguments.trace)
    kinds, collectives = trace.kinds(), trace.collectives()
    if not collectives:
        said = ", ".join(f"{time_us / 1e3:.4g} ms of {kind}" for kind, (_, time_us) in kinds.items())
        raise ValueError(f"profile (={arguments.trace}) must hold collectives: it has {said}")
    if arguments.write_network is not None:
        written = json.dumps({"source": arguments.trace, "us": trace.curves()}, indent=1)
        with Path(arguments.write_network).open("x") as file:
            file.write(written + "\n")
    notes, rows = [*trace.notes], []
    for (kind, num_bytes, num_ranks), times_us in collectives.items():
        shortest, curve, ratio = min(times_us), "-", "-"
        if network and num_bytes is not None and num_ranks is not None and kind in KINDS:
            curve_us = network.seconds(kind, num_bytes, range(num_ranks)) * 1e6
            curve, ratio = f"{curve_us:,.1f}", f"{shortest / curve_us:.2f}" if curve_us else "-"
            notes.append(network.assumed(kind, num_bytes, range(num_ranks)))
        size = "?" if num_bytes is None else in_bytes(num_bytes)
        times = f"{len(times_us):,}", f"{median(times_us):,.1f}", f"{shortest:,.1f}"
        rows.append((kind, size, str(num_ranks or "?"), *times, curve, ratio))
    devices = [[name, *(f"{us / 1e3:.3f}" for us in one)] for name, one in trace.overlaps().items()]
    print(f"{arguments.trace}\n\n{table(_DEVICE_HEADS, devices)}\n")
    print(table(_KIND_HEADS, [[kind, f"{count:,}", f"{us / 1e3:.3f}"] for kind, (count, us) in kinds.items()]))
    print(f"\n{table(_HEADS, rows)}\n\n{paragraph(_LEGEND)}")
    said = network_in_words(machine, network) if machine and network else "no network: --target would give the curve"
    print(paragraph(said))
    for note in filter(None, dict.fromkeys(notes)):
        print(paragraph(f"note: {note}"))
