"""Eight simulated devices for every test and example of this package; tests of the lab where one can be made."""

import argparse

import pytest

from benchmarks.__main__ import make_options
from benchmarks.lab import Lab
from jaxddp.conftest import pytest_cmdline_main as pytest_cmdline_main  # and simulated devices
from jaxddp.conftest import pytest_configure as pytest_configure
from jaxddp.conftest import pytest_runtest_protocol as pytest_runtest_protocol


def options(**given):
    """Those of a command line."""
    return argparse.Namespace(**dict.fromkeys(make_options()) | given)


NO_LAB = pytest.StashKey[str]()


@pytest.hookimpl(trylast=True)  # after -m and -k have made their choice
def pytest_collection_modifyitems(config, items):
    of_lab = [item for item in items if item.get_closest_marker("lab")]
    if not of_lab:
        return
    try:
        with Lab(2, 1000):
            pass
    except ValueError as reason:
        config.stash[NO_LAB] = f"{len(of_lab)} tests marked lab were left out: {reason}"
        if hasattr(config, "workeroutput"):  # one of several processes: another one reports
            config.workeroutput["no lab"] = config.stash[NO_LAB]
        config.hook.pytest_deselected(items=of_lab)
        items[:] = [item for item in items if item not in of_lab]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if said := getattr(node, "workeroutput", {}).get("no lab"):
        node.config.stash[NO_LAB] = said


def pytest_terminal_summary(terminalreporter, config):
    if NO_LAB in config.stash:
        terminalreporter.write_line(config.stash[NO_LAB])
