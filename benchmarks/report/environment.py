"""The environment of a run, read from its rows: command, code, versions, machine, ranks and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..harness.steal_time import in_words
from ..harness.values import Row, by, number, text
from .markup import Markup, tag
from .runs import RunRows, experiment_of

# Fields that describe the environment, not a result.
ENVELOPE = frozenset(
    "benchmark part commit command measured_at machine cores system python versions device ranks threads".split()
) | {"link_mbit", "job_hosts", "launcher", "stolen_share", "driver", "gpus", "variables"}


def facts(run: RunRows) -> dict[str, list[str]]:
    """Collects the environment of a run: distinct statements by name; where experiments differ, each names its own."""
    said = {name: _by_experiment(run, of) for name, of in _FACTS.items()}
    said["versions"] = _versions(run.rows)
    times = sorted({text(row, "measured_at") for row in run.rows} - {""})
    said["measured"] = [times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"] if times else []
    return {name: lines for name, lines in said.items() if lines}


def differences(one: RunRows, other: RunRows) -> list[str]:
    """Lists the differences in environment between two runs, over what both measured, except times."""
    shared = one.experiments.keys() & other.experiments.keys()
    ours, theirs = (
        facts(RunRows(run.name, [row for row in run.rows if experiment_of(row) in shared])) for run in (one, other)
    )
    names = [name for name in (*_FACTS, "versions") if ours.get(name) != theirs.get(name)]
    return [
        f"{name} ({'; '.join(ours.get(name, ['not said']))} / {'; '.join(theirs.get(name, ['not said']))})"
        for name in names
    ]


def render_environment(run: RunRows) -> Markup:
    """Renders the environment of a run as a list of terms."""
    pairs = []
    for name, lines in facts(run).items():
        shown = [tag("code", line) if name == "command" else line for line in lines]
        pairs.append(tag("div", tag("dt", name), *(tag("dd", line) for line in shown)))
    return tag("dl", *pairs)


def _by_experiment(run: RunRows, of: Callable[[Sequence[Row]], list[str]]) -> list[str]:
    """Lines about each experiment's rows; lines that are not true of all experiments name theirs."""
    said = [(line, experiment.label) for experiment, rows in run.experiments.items() for line in of(rows)]
    everyone = {label for _, label in said}
    return [
        line if len(some) == len(everyone) else f"{line} ({', '.join(label for _, label in some)})"
        for line, some in by(said, lambda one: one[0]).items()
    ]


def _distinct(words_of: Callable[[Row], str]) -> Callable[[Sequence[Row]], list[str]]:
    return lambda rows: list(dict.fromkeys(filter(None, map(words_of, rows))))


def _texts(key: str) -> Callable[[Sequence[Row]], list[str]]:
    return _distinct(lambda row: text(row, key))


def _machine(row: Row) -> str:
    cores = f"{text(row, 'cores')} cores" if "cores" in row else ""
    return ", ".join(filter(None, [text(row, "machine"), text(row, "system"), cores]))


def _gpus(row: Row) -> str:
    gpus = row.get("gpus")
    named = [gpu for gpu in gpus if isinstance(gpu, str)] if isinstance(gpus, list) else []
    names = [f"{count} x {name}" for name, count in Counter(named).items()]
    return ", ".join([*names, *([f"driver {text(row, 'driver')}"] if "driver" in row else [])])


def _variables(row: Row) -> str:
    set_here = row.get("variables")
    return ", ".join(f"{name}={value}" for name, value in set_here.items()) if isinstance(set_here, dict) else ""


def _ranks(row: Row) -> str:
    words = ", ".join(filter(None, [text(row, "ranks"), text(row, "backend")]))
    return ": ".join(filter(None, [text(row, "framework"), words])) if text(row, "ranks") else ""


def _steal(rows: Sequence[Row]) -> list[str]:
    most = max((number(row, "stolen_share") or 0.0 for row in rows), default=0.0)
    return [f"up to {said}" for said in [in_words(most)] if said]


def _versions(rows: Sequence[Row]) -> list[str]:
    found: dict[str, None] = {}
    for row in rows:
        versions = row.get("versions")
        for package, version in versions.items() if isinstance(versions, dict) else ():
            found[f"{package} {version}"] = None
        if "python" in row:
            found[f"python {text(row, 'python')}"] = None
    return [", ".join(sorted(found))] if found else []


_FACTS: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "command": _texts("command"),
    "commit": _texts("commit"),
    "machine": _distinct(_machine),
    "device": _texts("device"),
    "GPUs": _distinct(_gpus),
    "variables": _distinct(_variables),
    "ranks": _distinct(_ranks),
    "threads of a process": _texts("threads"),
    "launcher": _texts("launcher"),
    "links of the lab": _distinct(lambda row: experiment_of(row).rate),
    "not got": _steal,
}
