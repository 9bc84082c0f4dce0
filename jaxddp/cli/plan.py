"""``python -m jaxddp plan``: whether a training step fits a machine and keeps it busy, by formulas."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..planning.formulas import FP32, MIXED, MIXED_ACCUMULATED
from ..planning.machine import machine_of, target
from ..planning.plan import TrainingJob, plan
from ..planning.workload import Workload, feed_forward, transformer
from ..sizes import SIZES, TransformerConfig
from ..table import paragraph, table

XXL, CUSTOM = "xxl", "custom"
_TARGET = "v5p:64"
_SHAPE = ("vocab", "context", "width", "num_layers", "num_heads", "hidden")
_STATES = {"fp32": FP32, "mixed": MIXED, "mixed-fp32-sums": MIXED_ACCUMULATED}
# What numbers are multiplied with, by the end of their name, and the unit that they then have.
_ENDS = {"_gb_per_s": (1, "GB/s"), "_per_s": (1e-12, "TFLOP/s"), "_s": (1e3, "ms"), "_us": (1, "us"), "_mb": (1, "MiB")}


def add_parser(commands: Any) -> None:
    """Adds the command ``plan`` to argparse's subparsers."""
    parser = commands.add_parser(
        "plan",
        help="compute by formulas whether a step fits a machine and keeps it busy",
        description="Plan a training step by formulas. Without options it plans xxl, 126 feed-forward blocks of "
        "16384 x 53248, on 64 TPU v5p, FSDP 16 x TP 4, the example of the scaling book. GB are 10^9 bytes, MiB 2^20.",
    )
    add = parser.add_argument
    add("--model", default=XXL, choices=(XXL, CUSTOM, *SIZES), metavar="NAME", help="xxl, custom, or a transformer: "
        f"{', '.join(SIZES)} (default: %(default)s)")  # fmt: skip
    for name in _SHAPE:
        shape = name.removeprefix("num_")
        add(f"--{shape}", dest=name, type=int, metavar="N", help=f"{shape} of a transformer; all of --model custom")
    add("--target", default=_TARGET, metavar="SPEC", help="chip and count: h100:8, h100:4x8 for 4 hosts of 8, v5p:64; "
        "chips are h100, h200, a100, b200, gb200, gb300, v5p, v6e and v7x (default: %(default)s)")  # fmt: skip
    add("--fsdp", type=int, metavar="N", help="ranks that share the training state (default: all that --tp leaves)")
    add("--tp", type=int, metavar="N", help="ranks that split each matrix (default: 1, in the example 4)")
    add("--stage", type=int, default=3, choices=range(4), help="what --fsdp ranks share: 0 nothing, 1 the optimizer "
        "state, 2 also gradients, 3 also parameters (default: %(default)s)")  # fmt: skip
    add("--tokens", type=int, metavar="N", help="of a step, over all devices (default: the least compute-bound batch)")
    add("--dtype", default="bfloat16", metavar="NAME", help="of products, activations and communication (default: "
        "%(default)s)")  # fmt: skip
    add("--attention", default="full", choices=("full", "flash"), help="full: keeps the weights of the whole square; "
        "flash: computes what a causal mask leaves, and keeps none (default: %(default)s)")  # fmt: skip
    add("--checkpointing", default="none", choices=("none", "selective", "full"), help="selective: the backward "
        "computes all but attention and every second product again; full: the whole block (default: %(default)s)"
        )  # fmt: skip
    add("--precision", default="fp32", choices=_STATES, help="training state with Adam, in bytes a parameter: "
        "fp32 4 + 4 + 8, mixed 2 + 2 + 12, or with 4 more to accumulate gradients (default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead")

    hardware = parser.add_argument_group("the machine by hand", "instead of published numbers").add_argument
    hardware("--flops-per-s", type=float, metavar="X", help="FLOP/s of a device")
    hardware("--peaks", action="store_true", help="published peaks of products, memory and, without a file, links")
    hardware("--memory-gb", type=float, metavar="GB", help="memory of a device, 10^9 bytes")
    hardware("--link-gb-per-s", dest="gb_per_s", type=float, metavar="GB", help="10^9 bytes per second that a device "
             "can send within its host; on a TPU over one axis of its torus, in both directions")  # fmt: skip
    hardware("--host-link-gb-per-s", dest="host_gb_per_s", type=float, metavar="GB", help="to other hosts, on GPUs")
    hardware("--network-file", dest="file", metavar="FILE", help="measured collectives of a host, as for inspect")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Plans what the options ask for, and prints one JSON object, or the same numbers as a table."""
    found = {"model": arguments.model, **plan(_job(arguments))}
    if arguments.flops_per_s is not None:
        found["assumptions"]["rates"] = found["step_s"] = None  # nothing is known of its memory and kernels
    as_json = json.dumps(found, allow_nan=False)  # refuses numbers that overflowed
    print(as_json if arguments.json else as_text(found))


def as_text(found: dict[str, Any]) -> str:
    """A plan as a table, with what is said in sentences below it."""
    rows = {**found, "assumptions": {**found["assumptions"]}}
    rows["micro_batch"] = f"{found['micro_batch']:,.10g} {'tokens' if found['model'] == XXL else 'sequences'} a rank"
    rates, network = (rows["assumptions"].pop(name) for name in ("rates", "network_source"))
    del rows["target"]
    sentences = [f"Note: {note}" for note in rows.pop("notes")] + [rates, network and f"network: {network}"]
    text = table(("", ""), [*_rows(rows)], left=("",))
    below = (paragraph(f"{sentence}.") for sentence in sentences if sentence)
    return "\n".join([f"{found['model']} on {found['target']}\n", text, *below])


def _rows(found: Mapping[str, Any], indent: str = "", of: str = "") -> Iterator[tuple[str, str]]:
    """Names and numbers, in the unit that the name ends with, or that of the group which they are part of."""
    for name, value in found.items():
        ends = next((end for end in _ENDS if name.endswith(end)), "")
        unit = ends or ("bytes" if "bytes" in name else of)
        label = indent + name.removesuffix(ends).replace("_", " ")
        if isinstance(value, Mapping):
            yield label, ""
            yield from _rows(value, f"{indent}  ", unit)
        elif value is None or isinstance(value, (str, bool)):
            yield label, value if isinstance(value, str) else {None: "none", True: "yes", False: "no"}[value]
        elif unit in _ENDS:
            scale, symbol = _ENDS[unit]
            yield label, f"{value * scale:.4g} {symbol}"
        elif unit == "bytes" and value >= 1e5:
            yield label, f"{value / 1e9:.2f} GB" if value >= 1e7 else f"{value / 1e6:.3g} MB"
        else:
            yield label, f"{value:,.{0 if value == int(value) else 3}f}"


def _job(arguments: argparse.Namespace) -> TrainingJob:
    workload, sequence_length = _workload(arguments)
    asked = target(arguments.target, peaks=arguments.peaks)
    fsdp, tp = arguments.fsdp, arguments.tp
    if tp is None:
        tp = 4 if arguments.model == XXL and arguments.target == _TARGET and fsdp is None else 1
    if fsdp is None:
        fsdp = max(1, asked.num_devices // max(1, tp))
    memory_bytes = None if arguments.memory_gb is None else arguments.memory_gb * 1e9
    by_hand = {name: getattr(arguments, name) for name in ("flops_per_s", "gb_per_s", "host_gb_per_s", "file")}
    machine, network = machine_of(asked, arguments.dtype, memory_bytes=memory_bytes, **by_hand)
    return TrainingJob(
        workload, machine, network, fsdp, tp, arguments.tokens, sequence_length, arguments.stage,
        _STATES[arguments.precision], arguments.dtype,
    )  # fmt: skip


def _workload(arguments: argparse.Namespace) -> tuple[Workload, int]:
    """The model's counts, and the tokens of a sequence."""
    sizes = {name: value for name in _SHAPE if (value := getattr(arguments, name)) is not None}
    is_flash, checkpointing = arguments.attention == "flash", arguments.checkpointing
    if arguments.model == XXL:
        if sizes or is_flash or checkpointing != "none":
            raise ValueError("sizes, attention and checkpointing must come with a transformer, not with xxl")
        return feed_forward(width=16384, hidden=53248, num_blocks=126), 1
    if arguments.model != CUSTOM:
        sizes = asdict(SIZES[arguments.model]) | sizes
    if missing := [f"--{name.removeprefix('num_')}" for name in _SHAPE if name not in sizes]:
        raise ValueError(f"--model custom needs {', '.join(missing)} as well")
    config = TransformerConfig(**sizes)
    return transformer(**asdict(config), is_flash=is_flash, checkpointing=checkpointing), config.context
