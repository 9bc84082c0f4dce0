"""``python -m benchmarks``: the main job, and every other measurement of data parallelism in both frameworks."""

import argparse
import signal
import sys
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from jaxddp.cli.parser import Parser


def positive(kind: type) -> Any:
    """A type of options: numbers above 0."""

    def number(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
        return value

    return number


def make_options(strategies: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """The options of all benchmarks, as argparse takes them; a benchmark names those that it has."""
    from jaxddp.models import SIZES

    from .ranks import KINDS
    from .training.setup import DTYPES, NAMES

    strategies = strategies or NAMES
    return {
        "quick": {"action": "store_true", "help": "the short form"},
        "ranks": {"type": positive(int), "metavar": "N", "help": "ranks in each framework"},
        "on": {"choices": KINDS, "help": "what ranks are: devices of one JAX process, processes over Gloo, GPUs,"
               " processes on hosts of a lab, or the processes of a job that srun, torchrun or mpirun has started"},
        "hosts": {"type": positive(int), "metavar": "N", "help": "of a lab: hosts, 2 to 8 (default: 2)"},
        "rate_mbit": {"type": positive(float), "metavar": "R",
                      "help": "of a lab: what a host sends and receives (default: 1000 Mbit/s)"},
        "steps": {"type": positive(int), "metavar": "N", "help": "timed rounds"},
        "batch_size": {"type": positive(int), "metavar": "N", "help": "sequences of the global batch"},
        "model": {"choices": tuple(SIZES), "metavar": "NAME", "help": f"what is trained: {', '.join(SIZES)}"},
        "dtype": {"choices": DTYPES, "help": "the arithmetic of both frameworks: true float32 (default), float32 with"
                  " matrix products in TF32, or all in bfloat16"},
        "strategies": {"nargs": "+", "choices": strategies, "metavar": "NAME",
                       "help": f"what to compare: {', '.join(strategies)}"},
        "target": {"metavar": "SPEC", "help": "chip and count to compile for, such as h100:8"},
        "bucket_mb": {"nargs": "+", "type": positive(float), "metavar": "MIB", "help": "caps, where one is taken"},
        "sizes_mb": {"nargs": "+", "type": positive(float), "metavar": "MIB", "help": "buffers"},
        "minutes": {"type": positive(float), "metavar": "N", "help": "of each framework (default: 60)"},
        "seed": {"type": int, "metavar": "N", "help": "of the faults (default: 0)"},
        "framework": {"choices": ("jax", "torch", "both"), "help": "what is trained (default: jax)"},
    }  # fmt: skip


def make_parser(benchmark: Any = None) -> Parser:
    """The parser of a benchmark, or of the main job with a list of all."""
    from .registry import BENCHMARKS

    listed = "\n".join(f"  {one.name:12} {one.summary}" for one in BENCHMARKS.values())
    parser = Parser(
        prog=f"python -m benchmarks {benchmark.name if benchmark else ''}".strip(),
        description=benchmark.summary if benchmark else "Measures data parallelism in JAX and PyTorch, side by side.",
        epilog="" if benchmark else f"benchmarks, main if none is named:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    taken = benchmark or BENCHMARKS["main"]
    for name, how in make_options(taken.strategies).items():
        if name in taken.options:
            parser.add_argument(f"--{name.replace('_', '-')}", **how)
        else:
            parser.set_defaults(**{name: None})
    parser.add_argument("--out", metavar="DIR", help="folder for the results (default: a new one under runs/)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns 0, 1 if a check fails, 2 after bad input, 130 after an interrupt."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    from jaxddp.plugins import import_jax

    import_jax()
    from .benchmark import new_folder, run
    from .lab import lab_for
    from .ranks import join_job
    from .registry import BENCHMARKS

    name, *rest = arguments if arguments and not arguments[0].startswith("-") else ["", *arguments]
    if name and name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}: one of {', '.join(BENCHMARKS)}")
    options = make_parser(BENCHMARKS.get(name)).parse_args(rest)
    benchmark = BENCHMARKS[name or "main"]
    is_first, about = join_job() if options.on == "job" else (True, {})
    with lab_for(options) as lab:
        cases = benchmark.cases(options)  # refuses wrong options before there is a folder
        folder = new_folder(options.out, benchmark.name) if is_first else None
        say = partial(print, flush=True) if is_first else lambda text: None
        return 0 if run(benchmark, cases, folder, say, about | lab) else 1


if __name__ == "__main__":
    if "job" not in sys.argv:  # what has been made goes, as after a Ctrl-C; of a job the launcher ends all processes
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
