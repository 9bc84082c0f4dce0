"""Simulated devices, rank processes, and the table of differences that ends a test run."""

from __future__ import annotations

import pytest
import torch

from jaxddp.conftest import pytest_cmdline_main as pytest_cmdline_main  # and simulated devices
from jaxddp.conftest import pytest_configure as pytest_configure
from jaxddp.conftest import pytest_runtest_protocol as pytest_runtest_protocol
from torchref.conftest import ranks as ranks

from .cases import Case

torch.set_num_threads(1)  # two test processes share the cores, and these models are small

PAIRS = ("jaxddp - JAX on one device", "torchref - torch on one process", "jaxddp - torchref")


class Differences:
    """Largest differences found, case by case."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, case: Case, found: dict[str, float], moved: float, atol: float, reason: str) -> None:
        check = "ok" if max(found.values()) <= atol else "WRONG"
        self.rows.append(case._asdict() | found | {"moved": moved, "atol": atol, "reason": reason, "check": check})

    def table(self) -> list[str]:
        """Markdown: the largest difference of each kind, by model, dtype and strategy."""
        groups: dict[tuple, list[dict]] = {}
        for row in self.rows:
            groups.setdefault((row["dtype"], row["model"], row["optimizer"]), []).append(row)
        header = ["dtype", "model", "optimizer", "cases", *PAIRS, "tolerance", "check"]
        lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        for key, rows in sorted(groups.items()):
            worst = [f"{max(row[pair] for row in rows):.1e}" for pair in PAIRS]
            check = "ok" if all(row["check"] == "ok" for row in rows) else "WRONG"
            lines.append("| " + " | ".join([*key, str(len(rows)), *worst, f"{rows[0]['atol']:.0e}", check]) + " |")
        return lines


_DIFFERENCES = Differences()


@pytest.fixture(scope="session")
def differences() -> Differences:
    return _DIFFERENCES


def pytest_sessionfinish(session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes: what it found goes to the one that reports
        session.config.workeroutput["parity"] = _DIFFERENCES.rows


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    _DIFFERENCES.rows += getattr(node, "workeroutput", {}).get("parity", [])


def pytest_terminal_summary(terminalreporter) -> None:
    if not _DIFFERENCES.rows:
        return
    reasons = sorted({f"{row['atol']:.0e}: {row['reason']}" for row in _DIFFERENCES.rows})
    terminalreporter.section(
        "largest difference of any weight in 20 steps, from JAX on one device also of optimizer state, loss and norm"
    )
    for line in [*_DIFFERENCES.table(), *reasons]:
        terminalreporter.write_line(line)
