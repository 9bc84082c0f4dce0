"""``python -m jaxddp inspect``: what a training step would do on GPUs or TPUs that are not here."""

import argparse
import json
import math
import pkgutil
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ..arguments import check_integer
from ..communication.buckets import MIB
from ..network import KINDS, Network
from ..planning.chips import Target
from ..planning.machine import network_in_words, network_of, target
from ..plugins import import_jax
from ..sizes import SIZES
from ..table import count_kinds, paragraph, table

_HEADS = (
    "strategy", "planned", "compiled", "check", "volume\nMiB", "in\nflight", "late", "compute\nms", "comm\nms",
    "exposed\nms", "step\nms", "step\n/ bound", "peak\nGB",
)  # fmt: skip
_LEGEND = (
    "AR all-reduce, RS reduce-scatter, AG all-gather. In flight: share of the volume that starts while the backward "
    "still computes; late: after it. Exposed: step - compute. Peak: memory of one device"
)
_DEVICE_HEADS = ("device", "span\nms", "compute\nms", "comm\nms", "exposed\nms")
_SENT_HEADS = ("collective", "size", "ranks", "times", "median\nus", "shortest\nus", "curve\nus", "shortest\n/ curve")
_TRACE_LEGEND = (
    "Compute: while anything but a collective runs; exposed: communication without it. Curve: what the network takes "
    "for one; a collective's time includes the wait for the last rank, so the shortest is held against it."
)
_CHECKS = {None: "-", True: "ok", False: "NOT AS PLANNED"}


def add_parser(commands: Any) -> None:
    """Adds the command ``inspect`` to argparse's subparsers."""
    parser = commands.add_parser(
        "inspect",
        help="show what a step would do on GPUs or TPUs that are not here",
        description="Compile a training step (AdamW, float32 parameters) for accelerators that are not here, read the "
        "compiled program back, simulate it on a network, and show how communication overlaps. Simulated times know "
        "measured rates of products and memory, or with --peaks the published ones, but neither caches nor clocks.",
    )
    add, what = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    what("--model", default="seed_xl", choices=SIZES, metavar="NAME", help="a named size (default: %(default)s)")
    what("--trainer", metavar="MODULE:FUNCTION", help="your own training: the function gives (loss_fn, optimizer, "
         "params, batch), of which shapes are enough, and if wanted a dict of Trainer's options")  # fmt: skip
    what("--trace", metavar="PROFILE", help="read what ran instead: a file of jax.profiler or of torch.profiler, or "
         "its folder; collectives are held against --network-file or the links of --target, if given")  # fmt: skip
    add("--strategy", default="bucketed", metavar="NAME", help="such as bucketed or zero2, a wrong name lists all; "
        "auto: plain jit with replicated parameters (default: %(default)s)")  # fmt: skip
    add("--compare", nargs="+", default=[], metavar="NAME", help="more strategies, for the same table")
    add("--bucket-mb", type=float, metavar="MIB", help="bucket cap in MiB, 2^20 bytes, of the strategies that take one")
    add("--target", metavar="SPEC", help="chip and count: h100:8, h100:4x8 for 4 hosts of 8, v5p:64; chips are "
        "h100, h200, a100, b200, v5p; only plan knows gb200, gb300, v6e and v7x (default: h100:8)")  # fmt: skip
    add("--network-gb-per-s", type=float, metavar="GB", help="10^9 bytes per second that one rank can send: to other "
        "hosts if there are several, else to the others of its own (default: as measured, or its links)")  # fmt: skip
    add("--network-file", metavar="FILE", help="measured collectives of a host: what nccl-tests printed, a run "
        'folder of python -m benchmarks collectives, or JSON, {"us": {kind: {ranks: [[bytes, microseconds], ...]}}}; '
        "or measured:a3mega, two hosts of 8 H100 (default: as measured of the chip)")  # fmt: skip
    add("--peaks", action="store_true", help="published peaks of products, memory and, without --network-file, links")
    add("--batch-per-device", type=int, default=16, metavar="N", help="sequences of a model (default: %(default)s)")
    add("--dtype", default="f32", choices=("f32", "bf16"), help="of a model. f32: products are in TF32 on GPUs and in "
        "bfloat16 on TPUs; bf16: the loss takes bfloat16 copies of float32 parameters (default: f32)")  # fmt: skip
    add("--write-network", metavar="FILE", help="with --trace: write its collectives as a file for --network-file")
    add("--out", metavar="DIR", help="draw the simulated steps in DIR/timeline.png")
    parser.set_defaults(run=run, default_of=parser.get_default)


def run(arguments: argparse.Namespace) -> None:
    """Inspects what the options ask for, and shows it."""
    import_jax()  # late, so that the help needs no JAX
    import jax

    jax.config.update("jax_platforms", "cpu")  # compiling for targets needs no accelerator
    if arguments.trace is not None:
        return show_trace(arguments)
    if arguments.write_network is not None:
        raise ValueError(f"write_network (={arguments.write_network}) must come with --trace")
    inspections = inspected(arguments)
    show(inspections, arguments.trainer or arguments.model)
    if arguments.out is not None:
        from ..instruments.timeline import draw

        file = Path(arguments.out, "timeline.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        draw({one.strategy: one.simulation for one in inspections}, file, title=inspections[0].title)
        print(f"\n{file}")


def inspected(arguments: argparse.Namespace) -> list[Any]:
    """Gives what ``jaxddp.inspect`` finds for the options."""
    from ..instruments.inspect import inspect
    from ..registry import is_bucketed, make_strategy

    machine, network = machine_and_network(arguments)
    loss_fn, optimizer, params, batch, options = _training(arguments, machine.num_devices)
    strategies: list[Any] = [*dict.fromkeys([arguments.strategy, *arguments.compare])]
    if (cap := arguments.bucket_mb) is not None:
        if not any(map(is_bucketed, strategies)):
            raise ValueError(f"bucket_mb (={cap:g}) must come with a strategy that takes it, such as bucketed")
        strategies = [make_strategy(name, bucket_mb=cap) if is_bucketed(name) else name for name in strategies]
    return inspect(
        loss_fn, optimizer, params, batch, strategies, target=machine.spec, peaks=arguments.peaks, network=network,
        say=partial(print, flush=True), **options,
    )  # fmt: skip


def machine_and_network(arguments: argparse.Namespace) -> tuple[Target, Network]:
    """The target, 8 H100 by default, and what joins it; a given speed is that of the slowest link."""
    machine = target(arguments.target or "h100:8", peaks=arguments.peaks)
    of_link = "host_gb_per_s" if machine.num_hosts > 1 and machine.platform == "gpu" else "gb_per_s"
    return machine, network_of(machine, **{of_link: arguments.network_gb_per_s}, file=arguments.network_file)


def _training(arguments: argparse.Namespace, num_devices: int) -> tuple[Any, ...]:
    from ..instruments.inspect import transformer_training
    from ..training.train import Trainer

    if (spec := arguments.trainer) is None:
        num_sequences = check_integer("batch_per_device", arguments.batch_per_device) * num_devices
        training = transformer_training(SIZES[arguments.model], num_sequences)
        return training._replace(options={"compute_dtype": "bfloat16"} if arguments.dtype == "bf16" else {})
    for name in ("batch_per_device", "dtype"):
        if (value := getattr(arguments, name)) != arguments.default_of(name):
            raise ValueError(f"{name} (={value}) must be left out with --trainer, whose function decides it")
    sys.path.insert(0, str(Path.cwd()))  # as it is for ``python -m``
    try:
        make = pkgutil.resolve_name(spec)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"trainer (={spec}) must be MODULE:FUNCTION, such as my_module:make: {error}") from error
    made = make() if callable(make) else None  # an error within it is its author's, and is not caught
    if not isinstance(made, (tuple, list)) or len(made) not in (4, 5):
        raise ValueError(f"trainer (={spec}) must give (loss_fn, optimizer, params, batch), or these and options")
    *made, options = (*made, {})[:5]
    if unknown := {*options} - {one.name for one in fields(Trainer) if one.kw_only and one.init} - {"model_state"}:
        raise ValueError(f"trainer (={spec}) must give options of jaxddp.Trainer, or a model_state, not {min(unknown)}")
    return (*made, options)


def show(inspections: list[Any], model: str) -> None:
    """Prints the table; ``model`` is a model's name or a training's."""
    from ..planning.products import rates_in_words

    first = inspections[0]
    bound, chip = first.bound, first.target.chip
    print(paragraph(f"{model} on {first.title}"))
    print(paragraph(rates_in_words(chip)))
    # Four significant figures for the longest step.
    digits = max(0, 3 - math.floor(math.log10(max(each.simulation.step_s for each in inspections) * 1e3)))
    print(f"\n{table(_HEADS, [_cells(each, digits) for each in inspections], left=('check',))}\n")
    terms = bound.step_s, bound.compute_s, bound.forward_s, bound.first_gradient_s, bound.all_reduce_s
    step, compute, forward, gradient, all_reduce = (f"{seconds * 1e3:.{digits}f}" for seconds in terms)
    print(paragraph(
        f"No schedule can beat the bound, {step} ms: the greater of compute {compute} and forward {forward} "
        f"+ first gradient {gradient} + all-reduce of everything {all_reduce}."
    ))  # fmt: skip
    pool = f"; JAX takes {chip.pool_bytes / 1e9:.1f} unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"
    print(paragraph(f"{_LEGEND}, of {chip.memory_bytes / 1e9:.1f}{pool if chip.platform == 'gpu' else ''}."))
    for each in inspections:
        for note in each.notes:
            print(paragraph(f"{each.strategy}: {note}"))


def _cells(one: Any, digits: int) -> list[str]:
    overlap, simulation = one.schedule.overlap(), one.simulation
    shares = overlap.bytes_in_flight, overlap.bytes_started_after_backward
    times = simulation.compute_s, simulation.communication_s, simulation.exposed_s, simulation.step_s
    return [
        one.strategy, "-" if one.as_planned is None else count_kinds(one.planned), count_kinds(one.compiled),
        _CHECKS[one.as_planned], f"{overlap.num_bytes / MIB:.1f}",
        *(f"{share / (overlap.num_bytes or 1):.0%}" for share in shares),
        *(f"{seconds * 1e3:.{digits}f}" for seconds in times),
        f"{simulation.step_s / one.bound.step_s:.3f}", f"{one.memory['peak'] / 1e9:.1f}",
    ]  # fmt: skip


def show_trace(arguments: argparse.Namespace) -> None:
    """Reads the profile and prints tables; writes the file for ``--network-file`` if asked."""
    from ..instruments.collectives import in_bytes
    from ..instruments.trace import read_trace

    machine = network = None
    if {arguments.target, arguments.network_file, arguments.network_gb_per_s} != {None}:
        machine, network = machine_and_network(arguments)
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
    of_kinds = [[kind, f"{count:,}", f"{us / 1e3:.3f}"] for kind, (count, us) in kinds.items()]
    print(table(("kind", "events", "all of them\nms"), of_kinds))
    print(f"\n{table(_SENT_HEADS, rows)}\n\n{paragraph(_TRACE_LEGEND)}")
    print(paragraph(network_in_words(machine, network) if machine and network else "no network: give --target"))
    for note in filter(None, dict.fromkeys(notes)):
        print(paragraph(f"note: {note}"))
