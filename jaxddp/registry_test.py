"""A strategy is one file: where it lies in the folder, everything finds it."""

import subprocess
import sys

FILE = """
from jaxddp.communication.buckets import plan_buckets
from jaxddp.strategy import Strategy, register


@register
def fixed(bucket_mb=0.001):
    return Strategy("fixed", lambda tensors: plan_buckets(tensors, bucket_mb))
"""
SCRIPT = """
import sys

import jaxddp.ddp

jaxddp.ddp.__path__.append(sys.argv[1])
import jax.numpy as jnp
import optax
from benchmarks.harness.options import add_options
from benchmarks.strategies.benchmark import NAMES, spec_of
from jaxddp.__main__ import main
from jaxddp.cli.parser import Parser

assert list(jaxddp.STRATEGIES)[-4:] == ["fixed", "zero1", "zero2", "zero3"]
assert "fixed" in NAMES and spec_of("fixed", "byte").bucket_mb
for command in ("train", "inspect"):
    try:
        main([command, "--help"])
    except SystemExit:
        pass
parser = Parser()
add_options(parser)
print(parser.format_help())

jaxddp.simulate_devices(2)
strategy = jaxddp.make_strategy("fixed")
loss_fn = lambda params, x: jnp.mean((x * params["w"]) ** 2)
trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2))
state, metrics = trainer.step(trainer.init({"w": jnp.ones(4)}), jnp.ones((2, 4)))
assert metrics["loss"] == 1 and trainer.params(state)["w"].max() < 1
"""


def test_a_strategy_is_found_in_its_file(tmp_path):
    (tmp_path / "fixed.py").write_text(FILE)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fixed") == 3
