"""The pytest plugin, as another project uses it."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from jaxddp.comparison_test import refusal

PROGRAM = """
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxddp

jaxddp.simulate_devices(4)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
layers = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, "data")))
x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
SCALE = 1.0


def forward(layers, x):
    def layer(x, weight):
        return jnp.tanh(x @ weight) * SCALE, None

    return jax.lax.scan(layer, x, layers)[0]


def test_as_listed(assert_collectives):
    assert_collectives(forward, (layers, x), [("all-gather", 256)] * 3, max_bytes=768, reduced_once=True)


def test_as_before(assert_collectives_match):
    assert_collectives_match(forward, (layers, x), "new/f.collectives")
"""
FAULTS = """

def test_one_gather_less(assert_collectives):
    assert_collectives(forward, (layers, x), [("all-gather", 256)] * 2)


def test_in_a_loop(assert_collectives):
    assert_collectives(forward, (layers, x), not_in_loops=["all-gather"])


def test_too_much(assert_collectives):
    assert_collectives(forward, (layers, x), max_bytes=767)


def test_of_a_loop_that_may_run_often(assert_collectives):
    def until_small(layers, x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x @ layers[0], x)

    assert_collectives(until_small, (layers, x), max_bytes=1024)


def test_another_than_before(assert_collectives_match):
    assert_collectives_match(lambda layers, x: forward(layers, x + jnp.sum(x)), (layers, x), "new/f.collectives")


def test_one_more_than_before(assert_collectives_match):
    assert_collectives_match(lambda layers, x: forward(layers, forward(layers, x)), (layers, x), "new/f.collectives")
"""


def run(folder, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "jaxddp.pytest_plugin", "-p", "no:cacheprovider", *options]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of this tree, whichever one is installed
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


def test_a_step_is_held_to_a_list_and_to_a_snapshot(tmp_path):
    file = tmp_path / "step_test.py"
    file.write_text(PROGRAM)
    status, text = run(tmp_path, "--update-collectives", "-k", "as_before")
    assert status == 0, text
    file.write_text(program := f"# a line more: moved lines are no change\n{PROGRAM}{FAULTS}")
    status, text = run(tmp_path)
    assert status == 1 and "5 failed, 3 passed, 1 warning" in text and "trip count unknown, counted once" in text
    # The diff of the first: of the product, or of the loop that cuts the weight, as newer versions of XLA have it.
    lines = [number for number, line in enumerate(program.splitlines(), 1) if "tanh" in line or "lax.scan" in line]
    assert any(f"+ 1 x all-gather of 256 bytes: {file}:{line}\n" in text for line in lines)
    assert "3 layers" not in text and "768 B are sent where 767 bytes are allowed" in text
    assert "all-reduce" in text and "+ 3 x all-gather of 256 bytes" in text  # another, and one more of the same


def test_installed_packages_offer_the_plugin():
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    module = importlib.import_module(project["entry-points"]["pytest11"]["jaxddp"])
    assert module.assert_collectives and module.assert_collectives_match
    assert "not 'all_gather'" in refusal(module.check_collectives, None, not_in_loops=["all_gather"])
