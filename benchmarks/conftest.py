"""Eight simulated devices for every test and example of this package; tests of the lab where one can be made."""

import argparse
import json

import pytest

from benchmarks.__main__ import make_options
from benchmarks.benchmark import METRICS
from benchmarks.lab import Lab
from jaxddp.conftest import (
    pytest_cmdline_main as pytest_cmdline_main,  # and simulated devices
    pytest_configure as pytest_configure,
    pytest_runtest_protocol as pytest_runtest_protocol,
)


def options(**given):
    return argparse.Namespace(**dict.fromkeys(make_options()) | given)


def read_rows(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


@pytest.hookimpl(trylast=True)  # after -m and -k have made their choice
def pytest_collection_modifyitems(items):
    if not (of_lab := [item for item in items if item.get_closest_marker("lab")]):
        return
    try:
        with Lab(2, 1000):
            pass
    except ValueError as reason:
        for item in of_lab:
            item.add_marker(pytest.mark.skip(reason=str(reason)))
