"""``python -m benchmarks``: the main job, and every other measurement of data parallelism in both frameworks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jaxddp.cli.interrupts import ended_by_interrupts, kept_interrupts

with ended_by_interrupts():
    from jaxddp.cli.parser import Parser

    from .harness.options import OPTIONS, Options, add_options, read_options
    from .registry import BENCHMARKS, check_taken

_OPTIONS = "options.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark.

    Returns:
        The exit status: 0, 1 if a check fails, 2 after bad input, 130 after an interrupt.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["report"]:
        from .report.command import main as report

        return report(arguments[1:])
    described = "\n".join(f"  {name:12} {one.summary}" for name, one in BENCHMARKS.items())
    asked = BENCHMARKS.get(arguments[0]) if arguments else None  # whose options --help lists
    parser = Parser(
        prog=f"python -m benchmarks {arguments[0]}" if asked else "python -m benchmarks",
        description=asked.summary if asked else __doc__.splitlines()[0].replace("``", ""),
        epilog=None
        if asked
        else f"benchmarks:\n{described}\n\nreport RUN [RUN ...]: the page of a run, or of several compared",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmark",
        nargs="?",
        choices=BENCHMARKS,
        metavar="BENCHMARK",
        help=argparse.SUPPRESS if asked else "main when it is left out, all with --quick",
    )
    add_options(parser, asked.takes if asked else OPTIONS)
    parser.add_argument("--out", metavar="DIR", help="folder for the results (default: a new one under runs/)")
    parser.add_argument("--resume", metavar="DIR", help="go on with a run that was stopped, as it was called")
    parsed = parser.parse_args(arguments)

    with ended_by_interrupts():
        from jaxddp.cli.quiet import import_jax

        import_jax()
        from torchref.launch import RankError

        from .harness.console import make_console
        from .harness.job_hosts import hosts_for, job_of, serve
        from .harness.ranks import num_gpus
        from .harness.results import new_run_folder
        from .harness.run import Run
        from .lab.benchmark import lab_for, link_holds
        from .report import PAGE, write_report

    try:
        options, folder = read_options(parsed), None
        name = parsed.benchmark or ("main" if options.on == "job" or not options.quick else "all")
        if not parsed.resume:
            check_taken(name, options)
        job = job_of(name, options.on, parsed.resume)
        if job is not None and job.process_id:
            return serve(job, num_gpus())
        if parsed.resume:
            if parsed.benchmark or parsed.out or options != Options():
                raise ValueError(f"resume (={parsed.resume}) goes on as the run was called: nothing else can be given")
            name, options, folder = _stopped(parsed.resume)
        with kept_interrupts(), lab_for(name, options) as options, hosts_for(options.on, job, num_gpus):
            benchmark = BENCHMARKS[name].module
            setup, line = benchmark.describe(options)
            if folder is None:
                folder = new_run_folder(parsed.out, name)
                (folder / _OPTIONS).write_text(json.dumps({"benchmark": name} | asdict(options)) + "\n")
            console = make_console()
            console.print(line, soft_wrap=True)
            try:
                as_asked = link_holds(options, folder, console)
                holds = benchmark.run(Run(folder, console, name), setup) and as_asked
                write_report([folder], folder / PAGE)
                console.print(f"all of it on one page: {folder / PAGE}", soft_wrap=True)
            except RankError as error:
                (path := folder / "error.txt").write_text(str(error))
                print(f"error: {str(error).splitlines()[0]}; its traceback is in {path}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print(f"interrupted; to go on: python -m benchmarks --resume {folder}", file=sys.stderr)
                return 130
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0 if holds else 1


def _stopped(path: str) -> tuple[str, Options, Path]:
    """What a run that was stopped was called with."""
    folder = Path(path)
    if not (folder / _OPTIONS).is_file():
        raise ValueError(f"resume (={path}) must be the folder of a run, with its {_OPTIONS}")
    try:
        given = json.loads((folder / _OPTIONS).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / _OPTIONS} is damaged: {error}") from error
    if not isinstance(given, dict) or given.get("benchmark") not in list(BENCHMARKS):
        raise ValueError(f"{folder / _OPTIONS} is damaged: it names no benchmark")
    return given["benchmark"], read_options(given), folder


if __name__ == "__main__":
    sys.exit(main())
