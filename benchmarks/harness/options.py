"""The command-line options of all benchmarks; each benchmark takes some of them and chooses their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..training.arithmetic import DTYPES
from .ranks import KINDS

FRAMEWORKS = ("jax", "torch", "both")
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}


def _option(
    help: str, metavar: str | None = None, *, default: Any = None, choices: Collection[str] | None = None
) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar, "choices": choices})


@dataclass(frozen=True)
class Options:
    """The options that were given, as the command line describes them; None where the benchmark decides."""

    quick: bool = _option("the short form", default=False)
    ranks: int | None = _option("ranks in each framework (default: 2)", "N")
    on: str | None = _option(
        "what JAX's ranks are: devices of one process, processes over Gloo, GPUs, processes on hosts of a lab, or"
        " GPUs or processes on the hosts of a job that srun, torchrun or mpirun has started"
        " (default: GPUs where there are any, else simulated devices); torch's are processes",
        choices=KINDS,
    )
    hosts: int | None = _option("of a lab: hosts, 2 to 8 (default: 2)", "N")
    rate_mbit: float | None = _option("of a lab: what a host sends and receives (default: 1000 Mbit/s)", "R")
    steps: int | None = _option("timed rounds", "N")
    batch_size: int | None = _option("sequences of the global batch", "N")
    model: str | None = _option("what is trained", "NAME")
    dtype: str | None = _option(
        "the arithmetic of both frameworks: float32 (default), its matrix products in TF32, or all in bfloat16",
        choices=DTYPES,
    )
    data: str | None = _option(
        "text for a model of bytes, a file or folder (default: the Python standard library's sources)", "PATH"
    )
    target: str | None = _option(
        "of memory: a target, or cpu:N for N simulated devices (default: h100:2); of scaling: the largest to"
        " simulate (default: h100:512)",
        "SPEC",
    )
    strategies: tuple[str, ...] | None = _option("strategies to compare: STRATEGIES", "NAME")
    bucket_mb: tuple[float, ...] | None = _option("of buckets: caps, in MiB", "MIB")
    sizes_mb: tuple[float, ...] | None = _option("of collectives: buffers, in MiB", "MIB")
    nccl_tests: tuple[str, ...] | None = _option(
        "of collectives: what nccl-tests printed, such as all_reduce_perf, to show beside them", "FILE"
    )
    in_a_row: int | None = _option(
        "of strategies and collectives: time N steps, or calls of small buffers, between two synchronisations as"
        " well (default: 10 steps and 20 calls on GPUs, elsewhere none)",
        "N",
    )
    profile: bool = _option("of strategies: record traces of both frameworks", default=False)
    minutes: float | None = _option("of soak: of each framework (default: 60)", "N")
    seed: int | None = _option("of soak: of the faults (default: 0)", "N")
    framework: str | None = _option("of soak: what is trained (default: jax)", choices=FRAMEWORKS)

    def __post_init__(self) -> None:
        """Checks what does not depend on the benchmark: raises ValueError for wrong types and numbers."""
        for one in fields(self):  # those of a stopped run come from a file
            if not _is_of(getattr(self, one.name), str(one.type)):
                raise ValueError(f"{one.name} (={getattr(self, one.name)!r:.60}) must be of type {one.type}")
            if (choices := one.metadata["choices"]) and getattr(self, one.name) not in (None, *choices):
                raise ValueError(f"{one.name} (={getattr(self, one.name)!r}) must be one of {', '.join(choices)}")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise ValueError(f"minutes (={self.minutes:g}) must be positive")
        for name in ("ranks", "steps", "batch_size", "in_a_row"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} (={value}) must be a positive integer")
        for name in ("bucket_mb", "sizes_mb"):
            for value in getattr(self, name) or ():
                if not 0 < value < float("inf"):
                    raise ValueError(f"{name} (={value:g}) must be a positive number of MiB")


OPTIONS = tuple(one.name for one in fields(Options))


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a type of `Options`, given as it is written there."""
    if kind.endswith(" | None"):
        return value is None or _is_of(value, kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        return isinstance(value, tuple) and all(_is_of(one, kind[6:].partition(",")[0]) for one in value)
    return type(value).__name__ in ({"int", "float"} if kind == "float" else {kind})


def add_options(parser: argparse.ArgumentParser, shown: Collection[str] = OPTIONS) -> None:
    """Adds the arguments of `Options` to a parser, whose help lists those that are shown."""
    for one in fields(Options):
        kind, how = str(one.type).removesuffix(" | None"), dict(one.metadata)
        if one.name not in shown:
            how["help"] = argparse.SUPPRESS
        if kind == "bool":
            how = {"action": "store_true", "help": how["help"]}
        elif kind.startswith("tuple["):
            how |= {"nargs": "+", "type": _TYPES[kind[6:].partition(",")[0]]}
        else:
            how["type"] = _TYPES[kind]
        parser.add_argument(flag(one.name), **how)


def flag(option: str) -> str:
    """An option as the command line has it."""
    return f"--{option.replace('_', '-')}"


def read_options(parsed: argparse.Namespace | dict[str, Any]) -> Options:
    """Makes options from a parser's result, or from an earlier ``dataclasses.asdict``.

    Raises:
        ValueError: If one is of another type, or a number is not positive.
    """
    given = parsed if isinstance(parsed, dict) else vars(parsed)

    def plain(value: Any) -> Any:
        return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

    return Options(**{name: plain(given[name]) for name in OPTIONS if name in given})
