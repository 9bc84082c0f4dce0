"""The benchmarks: each is a module with ``describe(options) -> (setup, line)`` and ``run(run, setup) -> bool``."""

from __future__ import annotations

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A benchmark.

    Attributes:
        module: Its file.
        summary: What it measures, in a line.
        full_minutes: About what it takes on two cores of a laptop's kind; of collectives and lab the sum of parts that
            were measured one by one.
        quick_minutes: The same of its short form.
    """

    module: str
    summary: str
    full_minutes: int
    quick_minutes: int = 0

    def minutes(self, quick: bool) -> int:
        """About how long it takes."""
        return self.quick_minutes if quick else self.full_minutes


BENCHMARKS = {
    "main": Benchmark("main_job", "a byte-level language model under every strategy in both frameworks", 5),
    "strategies": Benchmark(
        "strategies", "the same beside what the frameworks do by themselves: jit, DDP, ZeRO, FSDP2", 5, 3
    ),
    "buckets": Benchmark("buckets.benchmark", "bucket sizes: measured beside predicted, in both frameworks", 6, 1),
    "collectives": Benchmark(
        "collectives.benchmark", "every collective by size, ranks and backend, with fitted latency and bandwidth", 20, 1
    ),
    "scaling": Benchmark(
        "scaling.benchmark", "strong and weak scaling, measured here and simulated up to 512 H100s", 5, 2
    ),
    "memory": Benchmark("memory.benchmark", "what a step holds on each device, by ZeRO stage", 2, 1),
    "gates": Benchmark("gates", "what may not cost more than what: jit, DistributedDataParallel, ZeRO-1", 3),
    "lab": Benchmark(
        "lab.benchmark", "strategies, buckets and collectives over a slow network, made on this machine", 50, 2
    ),
    "compile": Benchmark(
        "compilation.benchmark", "how long compilation takes, for up to 512 devices and 10,000 parameters", 20
    ),
    "all": Benchmark("all_job", "all but main and compile in one run; with --quick in some 10 minutes", 0),
}
