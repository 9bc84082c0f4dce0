"""Simulated devices, rank processes, and the table of differences that ends a test run."""

import pytest
import torch

from jaxddp.conftest import (
    pytest_cmdline_main as pytest_cmdline_main,  # and simulated devices
    pytest_configure as pytest_configure,
    pytest_runtest_protocol as pytest_runtest_protocol,
)
from jaxddp.table import table
from torchref.conftest import ranks as ranks

torch.set_num_threads(1)  # two test processes share the cores, and these models are small

PAIRS = ("jaxddp - JAX on one device", "torchref - torch on one process", "jaxddp - torchref")


_FOUND: list[dict] = []


@pytest.fixture(scope="session")
def differences() -> list[dict]:
    """Of each case its values, the largest differences by pair, and the tolerance with its reason."""
    return _FOUND


def pytest_sessionfinish(session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes: what it found goes to the one that reports
        session.config.workeroutput["parity"] = _FOUND


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    _FOUND.extend(getattr(node, "workeroutput", {}).get("parity", []))


def pytest_terminal_summary(terminalreporter) -> None:
    """The largest difference of each kind, by dtype, model and optimizer."""
    if not _FOUND:
        return
    groups: dict[tuple, list[dict]] = {}
    for row in _FOUND:
        groups.setdefault((row["dtype"], row["model"], row["optimizer"], f"{row['atol']:.0e}"), []).append(row)
    cells = []
    for key, rows in sorted(groups.items()):
        worst = [max(row[pair] for row in rows) for pair in PAIRS]
        check = "ok" if max(worst) <= rows[0]["atol"] else "WRONG"
        cells.append([*key, str(len(rows)), *(f"{one:.1e}" for one in worst), check])
    terminalreporter.section(
        "largest difference of any weight in 20 steps, from JAX on one device also of optimizer state, loss and norm"
    )
    terminalreporter.write_line(table(("dtype", "model", "optimizer", "tolerance", "cases", *PAIRS, "check"), cells))
    for line in sorted({f"{row['atol']:.0e}: {row['reason']}" for row in _FOUND}):
        terminalreporter.write_line(line)
