"""``python -m benchmarks``: the main job; ``gates``: what may not cost more than what; ``compile``; ``memory``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends the program with one line, without the usage that argparse would put before it."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark.

    Args:
        arguments: Those of the command line when None.

    Returns:
        The exit status: 0, 1 if a check fails, 2 after bad input, 130 after an interrupt.
    """
    parser = _Parser(prog="python -m benchmarks", description=__doc__.splitlines()[0].replace("``", ""))
    parser.add_argument(
        "benchmark", nargs="?", choices=("main", "gates", "compile", "memory"), default="main",
        help="main: train a byte-level language model under every strategy in both frameworks (default);"
        " gates: compare with jit and DistributedDataParallel in the same run;"
        " compile: time the compilation for up to 512 devices and 3,000 parameters;"
        " memory: what a step holds on each device, by ZeRO stage",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="folder for the results (default: a new one under runs/)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks in each framework (default: 2)")
    parser.add_argument("--steps", type=int, help="timed steps, or rounds (default: 20, of compile 3)")
    parser.add_argument("--batch-size", type=int, help="sequences of the global batch (default: 8, of memory 32)")
    parser.add_argument(
        "--data", metavar="PATH", help="file or folder of text (default: the Python standard library's sources)"
    )
    parser.add_argument("--model", metavar="NAME", default="seed_xl", help="of memory (default: %(default)s)")
    parser.add_argument(
        "--target", metavar="SPEC", default="h100:2",
        help="of memory: a target, or cpu:N for N simulated devices (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", metavar="NAME", nargs="+", default=["bucketed", "zero1", "zero2", "zero3"],
        help="of memory (default: one of each stage)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = 3 if options.benchmark == "compile" else 20
    if options.batch_size is None:
        options.batch_size = 32 if options.benchmark == "memory" else 8

    import jaxddp  # noqa: F401  first: it imports JAX without what plugins print whose devices are not there
    from torchref.launch import RankError

    from .compile_time import compile_setup, run_compile_time
    from .console import make_console
    from .gates import gates_setup, run_gates
    from .main_job import run_main_job, text_setup
    from .memory import memory_setup, run_memory
    from .results import new_run_folder

    try:
        for name in ("ranks", "steps", "batch_size"):
            if getattr(options, name) < 1:
                raise ValueError(f"{name} (={getattr(options, name)}) must be a positive integer")
        sizes = {"num_ranks": options.ranks, "num_steps": options.steps, "batch_size": options.batch_size}
        run: Callable[..., bool]
        setup: Any
        if options.benchmark == "compile":
            run, (setup, described) = run_compile_time, compile_setup(num_rounds=options.steps)
        elif options.benchmark == "memory":
            wanted = {name: getattr(options, name) for name in ("model", "target", "strategies", "batch_size")}
            run, (setup, described) = run_memory, memory_setup(**wanted)
        elif options.benchmark == "gates":
            run, (setup, described) = run_gates, gates_setup(**sizes)
        else:
            run, (setup, described) = run_main_job, text_setup(data=options.data, **sizes)
        folder, console = new_run_folder(options.out, options.benchmark), make_console()
        console.print(described, soft_wrap=True)
        try:
            holds = run(folder, console, setup)
        except RankError as error:
            (folder / "error.txt").write_text(str(error))
            print(f"error: {str(error).splitlines()[0]}; its traceback is in {folder / 'error.txt'}", file=sys.stderr)
            return 1
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
