"""The arithmetic that both frameworks are set to."""

import os

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from benchmarks.harness.ranks import Ranks
from benchmarks.training.arithmetic import _OF_JAX, OVERRIDES, check_dtype
from jaxddp.instruments.targets import mesh as target_mesh
from jaxddp.instruments.targets import start_compile


def overrides(ranks):
    """What a rank has inherited."""
    return [os.environ.get(name) for name in OVERRIDES]


def test_ranks_do_not_inherit_what_would_overrule_it(monkeypatch):
    for name in OVERRIDES:
        monkeypatch.setenv(name, "1")
    assert Ranks(1, "processes").run_torch(overrides) == [[None, None]]
    assert overrides(None) == ["1", "1"]


def test_tf32_is_refused_on_cpus():
    check_dtype("tf32", "gpus")
    check_dtype("bf16", "processes")
    with pytest.raises(ValueError, match=r"^dtype \(=tf32\) must be f32 or bf16 on CPUs"):
        check_dtype("tf32", "simulated")


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "products"), [("f32", "operand_precision={highest,highest}"), ("tf32", "algorithm=dot_tf32_tf32_f32")]
)
def test_products_of_a_step_compiled_for_a_gpu(dtype, products):
    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.naive(), target_mesh("h100:1"))
    with jax.default_matmul_precision(_OF_JAX[dtype]):
        state = trainer.abstract_state({"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)})
        program = start_compile(trainer, state, {"x": jax.ShapeDtypeStruct((128, 256), jnp.float32)}).result()
    found = [line for line in program.as_text().splitlines() if " dot(" in line]
    assert len(found) == 2 and all(products in line for line in found)
