"""A strategy is one file, a function in jaxddp and a class in torchref: in the folder, everything finds it."""

import pytest

from jaxddp.conftest import run_python

FILE = """
from functools import partial

from jaxddp.communication.buckets import plan_buckets
from jaxddp.ddp import replicated
from jaxddp.strategy import register


@register
def fixed(bucket_mb=0.001):
    return replicated("fixed", partial(plan_buckets, bucket_mb=bucket_mb))
"""
SCRIPT = """
import sys

import jaxddp.zero

jaxddp.zero.__path__.append(sys.argv[1])
import jax.numpy as jnp
import optax
from benchmarks.__main__ import make_parser
from benchmarks.training.setup import NAMES, spec_of

assert list(jaxddp.STRATEGIES)[-2:] == ["zero3", "fixed"]
assert "fixed" in NAMES and spec_of("fixed", "byte").bucket_mb
assert "fixed" in make_parser().format_help()

jaxddp.simulate_devices(2)
strategy = jaxddp.make_strategy("fixed")
loss_fn = lambda params, x: jnp.mean((x * params["w"]) ** 2)
trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2))
state, metrics = trainer.step(trainer.init({"w": jnp.ones(4)}), jnp.ones((2, 4)))
assert metrics["loss"] == 1 and trainer.params(state)["w"].max() < 1
"""


IN_TORCH = """
from jaxddp.communication.buckets import plan_buckets
from torchref.ddp import Replicated
from torchref.strategy import register


@register("fixed")
class FixedDDP(Replicated):
    def make_plan(self, tensors):
        return plan_buckets(tensors, 0.001)
"""
TORCH_SCRIPT = """
import importlib, sys

import torch
import torchref.registry
import torchref.zero

torchref.zero.__path__.append(sys.argv[1])
importlib.reload(torchref.registry)
from torchref.launch import init_from_env

assert list(torchref.STRATEGIES)[-2:] == ["zero3", "fixed"]
init_from_env("gloo")
net = torchref.make_strategy("fixed", torch.nn.Linear(4, 1))
net(torch.ones(2, 4)).sum().backward()
net.finish_gradient_synchronization()
assert net.module.bias.grad == 2
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("file", "script"), [(FILE, SCRIPT), (IN_TORCH, TORCH_SCRIPT)])
def test_a_strategy_is_found_in_its_file(tmp_path, file, script):
    (tmp_path / "fixed.py").write_text(file)
    run_python(script, tmp_path)
