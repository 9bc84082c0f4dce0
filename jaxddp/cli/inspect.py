"""``python -m jaxddp inspect``: what a training step would do on GPUs or TPUs that are not here."""

import argparse
import json
import math
import sys
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ..arguments import check_function, check_integer
from ..communication.buckets import MIB
from ..plugins import import_jax
from ..table import count_kinds, paragraph, table

_MODEL, _BATCH_PER_DEVICE = "seed_xl", 16
_HEADS = (
    "strategy", "planned", "compiled", "check", "volume\nMiB", "first\nstart", "in\nflight", "late", "compute\nms",
    "comm\nms", "exposed\nms", "step\nms", "step\n/ bound", "peak\nGB",
)  # fmt: skip
_LEGEND = (
    "AR all-reduce, RS reduce-scatter, AG all-gather. First start: share of the backward's FLOPs done before the first "
    "collective. In flight: share of the volume that starts while the backward still computes; late: after it. "
    "Exposed: step - compute. Peak: memory of one device"
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
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="a named size (default: seed_xl)")
    add("--trainer", metavar="MODULE:FUNCTION", help="your own training: the function gives (loss_fn, optimizer, "
        "params, batch), of which shapes are enough, and if wanted a dict of Trainer's options")  # fmt: skip
    add("--strategy", default="bucketed", metavar="NAME", help="such as bucketed or zero2, a wrong name lists all; "
        "auto: plain jit with replicated parameters (default: %(default)s)")  # fmt: skip
    add("--compare", nargs="+", default=[], metavar="NAME", help="more strategies, for the same table")
    add("--bucket-mb", type=float, metavar="MIB", help="bucket cap in MiB, 2^20 bytes (default: the strategy's)")
    add("--target", metavar="SPEC", help="chip and count: h100:8, h100:4x8 for 4 hosts of 8, v5p:64; chips are "
        "h100, h200, a100, b200, v5p; only plan knows gb200, gb300, v6e and v7x (default: h100:8)")  # fmt: skip
    add("--network-gb-per-s", type=float, metavar="GB", help="10^9 bytes per second that one rank can send: to other "
        "hosts if there are several, else to the others of its own (default: as measured, or its links)")  # fmt: skip
    add("--network-file", metavar="FILE", help="measured collectives of a host: what nccl-tests printed, a run "
        "folder of python -m benchmarks collectives, or a JSON file; or measured:a3mega, two hosts of 8 H100 (default: "
        "as measured of the chip)")  # fmt: skip
    add("--peaks", action="store_true", help="published peaks of products, memory and, without --network-file, links")
    add("--latency-us", type=float, metavar="US", help="microseconds per all-reduce (default: as measured, or 15)")
    add("--batch-per-device", type=int, metavar="N", help="sequences on each device (default: 16)")
    add("--dtype", metavar="NAME", choices=("f32", "bf16"), help="f32, whose products are in TF32 on GPUs and in "
        "bfloat16 on TPUs; or bf16: the loss takes bfloat16 copies of float32 parameters (default: f32)")  # fmt: skip
    add("--trace", metavar="PROFILE", help="read what ran instead: a file of jax.profiler or of torch.profiler, or its "
        "folder; collectives are held against --network-file or the links of --target, if one is given")  # fmt: skip
    add("--write-network", metavar="FILE", help="with --trace: write its collectives as a file for --network-file")
    add("--json", action="store_true", help="print one JSON object instead of the table; a picture only with --out")
    add("--out", metavar="DIR", help="folder for timeline.png (default: a new one under runs/)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Inspects what the options ask for, and shows it."""
    import_jax()  # late, so that the help needs no JAX
    import jax

    from .inspect_trace import show_trace

    jax.config.update("jax_platforms", "cpu")  # compiling for targets needs no accelerator
    if arguments.trace is not None:
        of_compiling = ("model", "out", "batch_per_device", "compare", "bucket_mb", "trainer", "dtype")
        _check_left_out(arguments, "trace", "is what ran", *of_compiling)
        return show_trace(arguments)
    if arguments.write_network is not None:
        raise ValueError(f"write_network (={arguments.write_network}) must come with --trace")
    folder = _folder(arguments)
    inspections = _inspected(arguments)
    if folder is not None:
        from ..instruments.timeline import draw

        folder.mkdir(parents=True, exist_ok=True)
        simulations = {inspection.strategy: inspection.simulation for inspection in inspections}
        draw(simulations, folder / "timeline.png", title=inspections[0].title)
    if arguments.json:
        print(json.dumps(as_json(inspections)))
    else:
        show(inspections, arguments.trainer or arguments.model or _MODEL, folder)


def _inspected(arguments: argparse.Namespace) -> list[Any]:
    from ..instruments.inspect import inspect
    from ..planning.machine import network_of, target

    machine = target(arguments.target or "h100:8", peaks=arguments.peaks)
    # A given speed is that of the slowest link.
    of_link = "host_gb_per_s" if machine.num_hosts > 1 and machine.platform == "gpu" else "gb_per_s"
    speed = {of_link: arguments.network_gb_per_s}
    network = network_of(machine, **speed, latency_us=arguments.latency_us, file=arguments.network_file)
    loss_fn, optimizer, params, batch, options = _training(arguments, machine.num_devices)
    strategies = [*dict.fromkeys([arguments.strategy, *arguments.compare])]
    return inspect(
        loss_fn, optimizer, params, batch, strategies, target=machine.spec, peaks=arguments.peaks,
        network=network, bucket_mb=arguments.bucket_mb,
        say=(lambda text: None) if arguments.json else partial(print, flush=True), **options,
    )  # fmt: skip


def _training(arguments: argparse.Namespace, num_devices: int) -> Any:
    from ..instruments.inspect import transformer_training
    from ..models import SIZES

    if arguments.trainer is not None:
        _check_left_out(arguments, "trainer", "says what is trained", "model", "batch_per_device", "dtype")
        return training_of(arguments.trainer)
    if arguments.batch_per_device is not None:
        check_integer("batch_per_device", arguments.batch_per_device)
    if (model := arguments.model or _MODEL) not in SIZES:
        raise ValueError(f"unknown model {model!r}: one of {', '.join(SIZES)}; another is for --trainer")
    training = transformer_training(SIZES[model], (arguments.batch_per_device or _BATCH_PER_DEVICE) * num_devices)
    return training._replace(options={"compute_dtype": "bfloat16"} if arguments.dtype == "bf16" else {})


def _folder(arguments: argparse.Namespace) -> Path | None:
    """The folder of the picture, which must not hold anything."""
    if arguments.json and arguments.out is None:
        return None
    folder = Path(arguments.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}-inspect")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out (={folder}) must not exist, or be an empty folder: nothing is overwritten")
    return folder


def _check_left_out(arguments: argparse.Namespace, option: str, why: str, *names: str) -> None:
    for name in names:
        if (value := getattr(arguments, name)) not in (None, []):
            raise ValueError(f"{name} (={value}) must be left out with --{option}, which {why}")


def training_of(spec: str) -> Any:
    """Imports and calls what ``--trainer`` names; an error within it is its author's, and is not caught."""
    module, _, function = spec.partition(":")
    if not module or not function:
        raise ValueError(f"trainer (={spec}) must be MODULE:FUNCTION, such as my_module:make")
    if str(Path.cwd()) not in sys.path:  # as it is for ``python -m``
        sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"trainer (={spec}) must name a function of a module that is found here: {error}") from error
    check_function(f"trainer {spec}", make)
    made = make()
    if not isinstance(made, tuple) or len(made) not in (4, 5) or not isinstance((*made, {})[4], dict):
        wanted = "(loss_fn, optimizer, params, batch), and a dict of options if any"
        raise ValueError(f"trainer (={spec}) must give {wanted}")
    return (*made, {})[:5]


def show(inspections: list[Any], model: str, folder: Path | None) -> None:
    """Prints the table and the picture's folder; ``model`` is a model's name or a training's."""
    from ..planning.products import rates_in_words

    first = inspections[0]
    print(paragraph(f"{model} on {first.title}"))
    print(paragraph(rates_in_words(first.target.chip)))
    found = [_object(each) for each in inspections]
    # Four significant figures for the longest step.
    digits = max(0, 3 - math.floor(math.log10(max(each["step_ms"] for each in found))))
    print(f"\n{table(_HEADS, [_cells(each, digits) for each in found], left=('check',))}\n")
    bound, chip = first.bound, first.target.chip
    terms = bound.step_s, bound.compute_s, bound.forward_s, bound.first_gradient_s, bound.all_reduce_s
    step, compute, forward, gradient, all_reduce = (f"{seconds * 1e3:.{digits}f}" for seconds in terms)
    print(paragraph(
        f"No schedule can beat the bound, {step} ms: the greater of compute {compute} and forward {forward} "
        f"+ first gradient {gradient} + all-reduce of everything {all_reduce}."
    ))  # fmt: skip
    pool = f"; JAX takes {chip.pool_bytes / 1e9:.1f} unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"
    print(paragraph(f"{_LEGEND}, of {chip.memory_bytes / 1e9:.1f}{pool if chip.platform == 'gpu' else ''}."))
    for each in found:
        for note in each["notes"]:
            print(paragraph(f"{each['strategy']}: {note}"))
    if folder is not None:
        print(f"\n{folder}: timeline.png")


def as_json(inspections: list[Any]) -> dict[str, Any]:
    """The first inspection as one object, with the others in its list ``compare``."""
    first, *others = map(_object, inspections)
    return {**first, "compare": others}


def _object(inspection: Any) -> dict[str, Any]:
    from ..planning.machine import network_in_words
    from ..planning.products import rates_in_words

    overlap, simulation, network = inspection.schedule.overlap(), inspection.simulation, inspection.network
    times = {
        "step": simulation.step_s, "compute": simulation.compute_s, "comm": simulation.communication_s,
        "exposed": simulation.exposed_s, "lower_bound": inspection.bound.step_s,
    }  # fmt: skip
    return {
        "strategy": inspection.strategy,
        "target": inspection.target.spec,
        "devices": inspection.target.num_devices,
        "network_gb_per_s": network.host_gb_per_s or network.gb_per_s,
        "network": network_in_words(inspection.target, network),
        "latency_us": network.latency_us,
        "rates": rates_in_words(inspection.target.chip),
        "product_dtypes": inspection.product_dtypes,
        "planned": [{"kind": kind, "bytes": num_bytes} for kind, num_bytes in inspection.planned],
        "compiled": [{"kind": kind, "bytes": num_bytes} for kind, num_bytes in inspection.compiled],
        "as_planned": inspection.as_planned,
        "bytes_started_after_backward": overlap.bytes_started_after_backward,
        "bytes_in_flight_during_backward": overlap.bytes_in_flight,
        "first_start_fraction": overlap.first_start_fraction,
        **{f"{name}_ms": seconds * 1e3 for name, seconds in times.items()},
        "memory": inspection.memory,
        "notes": inspection.notes,
    }


def _cells(found: dict[str, Any], digits: int) -> list[str]:
    planned, compiled = ([(one["kind"], one["bytes"]) for one in found[name]] for name in ("planned", "compiled"))
    total, first = sum(num_bytes for _, num_bytes in compiled), found["first_start_fraction"]
    shares = (found["bytes_in_flight_during_backward"], found["bytes_started_after_backward"])
    return [
        found["strategy"], "-" if found["as_planned"] is None else count_kinds(planned), count_kinds(compiled),
        _CHECKS[found["as_planned"]], f"{total / MIB:.1f}", "-" if first is None else f"{first:.0%}",
        *(f"{share / (total or 1):.0%}" for share in shares),
        *(f"{found[f'{name}_ms']:.{digits}f}" for name in ("compute", "comm", "exposed", "step")),
        f"{found['step_ms'] / found['lower_bound_ms']:.3f}", f"{found['memory']['peak'] / 1e9:.1f}",
    ]  # fmt: skip
