"""The command-line options of all benchmarks; each benchmark takes some of them and chooses their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..training.arithmetic import DTYPES
from .ranks import KINDS

FRAMEWORKS = ("jax", "torch", "both")


@dataclass(frozen=True)
class Options:
    """The options that were given; None where the benchmark decides."""

    quick: bool = False
    ranks: int | None = None
    on: str | None = None
    hosts: int | None = None
    rate_mbit: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    model: str | None = None
    data: str | None = None
    dtype: str | None = None
    target: str | None = None
    strategies: tuple[str, ...] | None = None
    bucket_mb: tuple[float, ...] | None = None
    sizes_mb: tuple[float, ...] | None = None
    nccl_tests: tuple[str, ...] | None = None
    in_a_row: int | None = None
    profile: bool = False
    minutes: float | None = None
    seed: int | None = None
    framework: str | None = None

    def __post_init__(self) -> None:
        """Checks what does not depend on the benchmark: raises ValueError for wrong types and numbers."""
        for field in fields(self):  # those of a stopped run come from a file
            if not _is_of(getattr(self, field.name), str(field.type)):
                raise ValueError(f"{field.name} (={getattr(self, field.name)!r:.60}) must be of type {field.type}")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise ValueError(f"minutes (={self.minutes:g}) must be positive")
        if self.framework not in (None, *FRAMEWORKS):
            raise ValueError(f"framework (={self.framework!r}) must be one of {', '.join(FRAMEWORKS)}")
        if self.on not in (None, *KINDS):
            raise ValueError(f"on (={self.on!r}) must be one of {', '.join(KINDS)}")
        for name in ("ranks", "steps", "batch_size", "in_a_row"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} (={value}) must be a positive integer")
        for name in ("bucket_mb", "sizes_mb"):
            for value in getattr(self, name) or ():
                if not 0 < value < float("inf"):
                    raise ValueError(f"{name} (={value:g}) must be a positive number of MiB")


OPTIONS = tuple(field.name for field in fields(Options))


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a type of `Options`, given as it is written there."""
    if kind.endswith(" | None"):
        return value is None or _is_of(value, kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        return isinstance(value, tuple) and all(_is_of(one, kind[6:].partition(",")[0]) for one in value)
    return type(value).__name__ in ({"int", "float"} if kind == "float" else {kind})


def add_options(parser: argparse.ArgumentParser, shown: Collection[str] = OPTIONS) -> None:
    """Adds the arguments of `Options` to a parser, whose help lists those that are shown."""

    def add(flag: str, *, help: str, **options: Any) -> None:
        is_shown = flag.removeprefix("--").replace("-", "_") in shown
        parser.add_argument(flag, help=help if is_shown else argparse.SUPPRESS, **options)

    add("--quick", action="store_true", help="the short form")
    add("--ranks", type=int, metavar="N", help="ranks in each framework (default: 2)")
    add(
        "--on", choices=KINDS,
        help="what JAX's ranks are: devices of one process, processes over Gloo, GPUs, processes on hosts of a lab, or"
        " GPUs or processes on the hosts of a job that srun, torchrun or mpirun has started"
        " (default: GPUs where there are any, else simulated devices); torch's are processes",
    )  # fmt: skip
    add("--hosts", type=int, metavar="N", help="of a lab: hosts, 2 to 8 (default: 2)")
    add("--rate-mbit", type=float, metavar="R", help="of a lab: what a host sends and receives (default: 1000 Mbit/s)")
    add("--steps", type=int, metavar="N", help="timed rounds")
    add("--batch-size", type=int, metavar="N", help="sequences of the global batch")
    add("--model", metavar="NAME", help="what is trained")
    add(
        "--dtype", choices=DTYPES,
        help="the arithmetic of both frameworks: float32 (default), its matrix products in TF32, or all in bfloat16",
    )  # fmt: skip
    add(
        "--data", metavar="PATH",
        help="text for a model of bytes, a file or folder (default: the Python standard library's sources)",
    )  # fmt: skip
    add(
        "--target", metavar="SPEC",
        help="of memory: a target, or cpu:N for N simulated devices (default: h100:2); of scaling: the largest to"
        " simulate (default: h100:512)",
    )  # fmt: skip
    add("--strategies", metavar="NAME", nargs="+", help="strategies to compare: STRATEGIES")
    add("--bucket-mb", type=float, metavar="MIB", nargs="+", help="of buckets: caps, in MiB")
    add("--sizes-mb", type=float, metavar="MIB", nargs="+", help="of collectives: buffers, in MiB")
    add(
        "--nccl-tests", metavar="FILE", nargs="+",
        help="of collectives: what nccl-tests printed, such as all_reduce_perf, to show beside them",
    )  # fmt: skip
    add(
        "--in-a-row", type=int, metavar="N",
        help="of strategies and collectives: time N steps, or calls of small buffers, between two synchronisations as"
        " well (default: 10 steps and 20 calls on GPUs, elsewhere none)",
    )  # fmt: skip
    add("--profile", action="store_true", help="of strategies: record traces of both frameworks")
    add("--minutes", type=float, metavar="N", help="of soak: of each framework (default: 60)")
    add("--seed", type=int, metavar="N", help="of soak: of the faults (default: 0)")
    add("--framework", choices=FRAMEWORKS, help="of soak: what is trained (default: jax)")


def read_options(parsed: argparse.Namespace | dict[str, Any]) -> Options:
    """Makes options from a parser's result, or from an earlier ``dataclasses.asdict``.

    Raises:
        ValueError: If one is of another type, or a number is not positive.
    """
    given = parsed if isinstance(parsed, dict) else vars(parsed)

    def plain(value: Any) -> Any:
        return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

    return Options(**{field.name: plain(given[field.name]) for field in fields(Options) if field.name in given})
