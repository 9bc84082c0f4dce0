"""``inspect --trace``: where the time of a profile went, and how its collectives compare with a network."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from ..instruments.collectives import in_bytes
from ..instruments.trace import Alike, Trace, read_trace
from ..network import KINDS, Network
from ..planning.machine import network_in_words, network_of, target
from ..table import paragraph, table

_NUM_KERNELS = 10
_KIND_HEADS = ("kind", "events", "all of them\nms", "share")
_KERNEL_HEADS = ("longest kernels", "kind", "events", "all of them\nms")
_LEGEND = (
    "Compute: while anything but a collective runs; exposed: communication without it. Curve: what the network takes "
    "for one; a collective's time includes the wait for the last rank, so the shortest is held against it"
)


def show_trace(arguments: argparse.Namespace) -> None:
    """Reads the profile and prints tables or one JSON object; writes the file for ``--network-file`` if asked.

    Raises:
        ValueError: If it is no profile, has no collectives, or options do not fit.
        OSError: If a file cannot be read or written.
    """
    network, words = _network(arguments)
    trace = read_trace(arguments.trace)
    found = trace.collectives()
    if not found:
        kinds = ", ".join(f"{time_us / 1e3:.4g} ms of {kind}" for kind, (_, time_us) in trace.kinds().items())
        raise ValueError(f"profile (={arguments.trace}) must hold collectives: it has {kinds}")
    if arguments.write_network is not None:
        _write(Path(arguments.write_network), trace, arguments.trace)
    if arguments.json:
        print(json.dumps(_object(trace, found, network, words)))
        return
    print(f"{arguments.trace}\n")
    print(table(("device", "span\nms", "compute\nms", "comm\nms", "exposed\nms", "exposed\nof comm"), _devices(trace)))
    total_us = sum(time_us for _, time_us in trace.kinds().values())
    rows = [
        [kind, f"{count:,}", f"{us / 1e3:.3f}", f"{us / total_us:.1%}"] for kind, (count, us) in trace.kinds().items()
    ]
    print(f"\n{table(_KIND_HEADS, rows)}\n")
    heads = ("collective", "size", "ranks", "times", "median\nus", "shortest\nus", "curve\nus", "shortest\n/ curve")
    print(table(heads, [_cells(one, network) for one in found]))
    rows = [
        [name[:60], kind, f"{count:,}", f"{us / 1e3:.3f}"]
        for (kind, name), (count, us) in list(trace.kernels().items())[:_NUM_KERNELS]
    ]
    print(f"\n{table(_KERNEL_HEADS, rows, left=('kind',))}\n")
    print(paragraph(f"{_LEGEND}. {words[:1].upper()}{words[1:]}."))
    for note in (*trace.notes, *_assumed(found, network)):
        print(paragraph(f"note: {note}"))


def _network(arguments: argparse.Namespace) -> tuple[Network | None, str]:
    """What ``--target`` and ``--network-file`` say; nothing if neither is given."""
    if arguments.target is None and arguments.network_file in (None, "measured"):
        if arguments.network_file is not None:
            raise ValueError("network_file (=measured) must come with --target, whose chip was measured")
        return None, "no network: --target or --network-file would give the curve"
    machine = target(arguments.target or "h100:8")  # of which a file replaces all that is used here
    network = network_of(
        machine, arguments.network_gb_per_s, latency_us=arguments.latency_us, file=arguments.network_file
    )
    return network, network_in_words(machine, network)


def _write(path: Path, trace: Trace, profile: str) -> None:
    if path.exists():
        raise ValueError(f"write_network (={path}) must not exist: nothing is overwritten")
    path.write_text(json.dumps({"source": profile, "us": trace.curves()}, indent=1) + "\n")


def _devices(trace: Trace) -> list[list[str]]:
    rows = []
    for device, one in trace.overlaps().items():
        share = f"{one.exposed_us / one.communication_us:.0%}" if one.communication_us else "-"
        rows.append([device, *(f"{time_us / 1e3:.3f}" for time_us in one), share])
    return rows


def _curve_us(one: Alike, network: Network | None) -> float | None:
    if network is None or one.num_bytes is None or one.num_ranks is None or one.kind not in KINDS:
        return None
    return network.seconds(one.kind, one.num_bytes, range(one.num_ranks)) * 1e6


def _cells(one: Alike, network: Network | None) -> list[str]:
    shortest, curve = min(one.times_us), _curve_us(one, network)
    return [
        one.kind, "?" if one.num_bytes is None else in_bytes(one.num_bytes),
        "?" if one.num_ranks is None else str(one.num_ranks), f"{len(one.times_us):,}", f"{median(one.times_us):,.1f}",
        f"{shortest:,.1f}", f"{curve:,.1f}" if curve else "-", f"{shortest / curve:.2f}" if curve else "-",
    ]  # fmt: skip


def _assumed(found: list[Alike], network: Network | None) -> list[str]:
    """What of the curve was not measured."""
    sent = [one for one in found if _curve_us(one, network)]
    why = [network.assumed(one.kind, one.num_bytes or 0, range(one.num_ranks or 0)) for one in sent if network]
    return sorted({*filter(None, why)})


def _object(trace: Trace, found: list[Alike], network: Network | None, words: str) -> dict[str, Any]:
    return {
        "devices": {device: one._asdict() for device, one in trace.overlaps().items()},
        "kinds": {kind: {"events": count, "us": us} for kind, (count, us) in trace.kinds().items()},
        "collectives": [
            {
                "kind": one.kind, "bytes": one.num_bytes, "ranks": one.num_ranks, "times": len(one.times_us),
                "median_us": median(one.times_us), "shortest_us": min(one.times_us),
                "curve_us": _curve_us(one, network),
            }
            for one in found
        ],
        "kernels": [
            {"name": name, "kind": kind, "events": count, "us": us}
            for (kind, name), (count, us) in trace.kernels().items()
        ],
        "network": words, "notes": [*trace.notes, *_assumed(found, network)],
    }  # fmt: skip
