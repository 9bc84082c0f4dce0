"""The benchmarks, one entry each.

A benchmark is a folder with two files: ``benchmark.py`` has ``describe(options) -> (setup, line)`` and
``run(run, setup) -> bool``, whether every check holds; ``section.py`` has ``section(rows)``, its tables and its part of
the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from .harness.options import OPTIONS, Options, flag

_MACHINE = ("quick", "ranks", "on", "hosts", "rate_mbit", "steps")
_TRAINING = (*_MACHINE, "batch_size", "model", "data", "dtype")
_SOAK = ("minutes", "seed", "framework")


class Benchmark(NamedTuple):
    """A benchmark.

    Attributes:
        full_minutes: Roughly how long it takes on the two cores of a laptop.
        quick_minutes: The same of its short form.
        takes: Names of the options that change it.
    """

    folder: str
    summary: str
    full_minutes: int
    quick_minutes: int = 0
    takes: tuple[str, ...] = OPTIONS

    @property
    def module(self) -> ModuleType:
        """Its ``benchmark.py``, imported on first use."""
        return import_module(f"benchmarks.{self.folder}.benchmark")

    def section(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Makes its section of the page."""
        return import_module(f"benchmarks.{self.folder}.section").section(rows)


BENCHMARKS = {
    "main": Benchmark(
        "main", "a byte-level language model under every strategy in both frameworks", 2,
        takes=(*_TRAINING, "strategies", "in_a_row", "profile"),
    ),
    "strategies": Benchmark(
        "strategies", "the same beside what the frameworks do by themselves: jit, DDP, ZeRO, FSDP2", 5, 3,
        (*_TRAINING, "strategies", "in_a_row", "profile"),
    ),
    "buckets": Benchmark(
        "buckets", "bucket sizes: measured beside predicted, in both frameworks", 6, 1,
        (*_TRAINING, "bucket_mb"),
    ),
    "collectives": Benchmark(
        "collectives", "every collective by size, ranks and backend, with fitted latency and bandwidth",
        20, 1, (*_MACHINE, "sizes_mb", "nccl_tests", "in_a_row"),
    ),
    "scaling": Benchmark(
        "scaling", "strong and weak scaling, measured here and simulated up to 512 H100s", 5, 2,
        (*_TRAINING, "strategies", "target"),
    ),
    "memory": Benchmark(
        "memory", "what a step holds on each device, by ZeRO stage", 4, 1,
        ("quick", "batch_size", "model", "strategies", "target"),
    ),
    "gates": Benchmark(
        "gates", "what may not cost more than what: jit, DistributedDataParallel, ZeRO-1", 3, 3, _TRAINING
    ),
    "lab": Benchmark(
        "lab", "strategies, buckets and collectives over a slow network, made on this machine", 50, 2,
        (*_TRAINING, "strategies", "bucket_mb", "sizes_mb", "in_a_row", "profile"),
    ),
    "compile": Benchmark(
        "compilation", "how long compilation takes, for up to 512 devices and 10,000 parameters", 20,
        takes=("steps",),
    ),
    "soak": Benchmark(
        "soak", "training while ranks are killed and stopped: what faults cost, and what stays behind", 90, 6,
        takes=("quick", "ranks", *_SOAK),
    ),
    "all": Benchmark(
        "all", "all but main, compile and soak in one run; with --quick in some 10 minutes", 0,
        takes=tuple(name for name in OPTIONS if name not in _SOAK),
    ),
}  # fmt: skip


def check_taken(name: str, options: Options) -> None:
    """Refuses options that a benchmark does not take; lab and all pass each option to those that take it.

    Raises:
        ValueError: If one would change nothing.
    """
    takes, nothing_said = BENCHMARKS[name].takes, Options()
    for option in OPTIONS:
        if option not in takes and getattr(options, option) != getattr(nothing_said, option):
            words = ", ".join(map(flag, takes))
            raise ValueError(f"{flag(option)} changes nothing of {name}, which takes {words}")
