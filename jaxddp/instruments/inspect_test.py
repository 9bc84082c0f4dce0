import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp import targets
from jaxddp.instruments.targets import TargetProgram
from jaxddp.instruments.testdata import load_fixture
from jaxddp.network import Network

WIDTH = 64
LAYERS = [{"kernel": jax.ShapeDtypeStruct((WIDTH, WIDTH), "f4"), "bias": jax.ShapeDtypeStruct((WIDTH,), "f4")}] * 3
NUM_PARAMS = 3 * (WIDTH * WIDTH + WIDTH)
ADAM = optax.adamw(1e-3)
TARGET = "h100:2x8"
NETWORK = Network(450, host_gb_per_s=50, devices_per_host=8)


def loss_of_layers(params, batch):
    x = batch
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x**2)


def inspected(strategies, num_rows, target=TARGET, network=NETWORK, optimizer=ADAM, **options):
    batch = jax.ShapeDtypeStruct((num_rows, WIDTH), "f4")
    of_machine = {"target": target, "network": network}
    return jaxddp.inspect(loss_of_layers, optimizer, LAYERS, batch, strategies, **of_machine, **options)


@pytest.fixture(scope="module")
def found():
    return inspected([jaxddp.bucketed(0.03), "auto"], 4 * 16)


@pytest.mark.full
def test_strategies_with_options_stand_beside_names():
    muon = optax.contrib.muon(1e-3)
    naive, zero1 = inspected(["naive", jaxddp.zero1(shard="leaves")], 4 * 8, "h100:8", optimizer=muon)
    assert zero1.strategy == "zero1 by leaves" and zero1.as_planned
    assert zero1.memory["optimizer_state"] < naive.memory["optimizer_state"] / 2


def test_memory_is_what_a_hand_computes(found):
    for each in found:
        assert each.memory["parameters"] == 4 * NUM_PARAMS == 49_920
        assert each.memory["optimizer_state"] == 2 * 4 * NUM_PARAMS + 4  # two moments and the count of steps
        assert each.memory["batch"] == 4 * WIDTH * 4  # 4 rows of float32
        assert each.memory["available"] == 80_000_000_000
        stats = each.schedule.memory
        # Beside these the program takes the state's step (4 bytes) and its random key (8); each may be padded.
        counted = sum(each.memory[name] for name in ("parameters", "optimizer_state", "batch"))
        assert 0 < stats.argument_size_in_bytes - counted <= 64
        assert each.memory["temporaries"] == stats.temp_size_in_bytes >= 4 * NUM_PARAMS  # at least the gradients


def test_each_prints_in_a_line(found):
    assert all(len(repr(one)) < 100 and one.strategy in repr(one) for one in found)


def test_the_bound_is_one_and_below_every_step(found):
    bucketed, auto = found
    assert bucketed.bound == auto.bound
    assert bucketed.bound.all_reduce_s == NETWORK.seconds("all-reduce", 4 * NUM_PARAMS, range(16))
    for each in found:
        assert each.simulation.step_s > each.bound.step_s


@pytest.mark.full
def test_the_bound_is_below_a_step_that_sends_less_than_the_bytes_of_the_parameters():
    """A frozen one is not sent, and zero1 gathers half of the bytes that it sums."""

    def loss_fn(params, mean, batch):
        return jnp.mean((batch.astype(params["w"].dtype) @ params["frozen"] @ params["w"]).astype("f4") ** 2), mean + 1

    params = {name: jax.ShapeDtypeStruct((512, 512), "float32") for name in ("frozen", "w")}
    found = jaxddp.inspect(
        loss_fn, optax.adamw(1e-3), params, jax.ShapeDtypeStruct((16, 512), "float32"), target="h100:2",
        strategies=["bucketed", "zero1"], network=Network(0.1), compute_dtype=jnp.bfloat16,
        trainable=lambda name: name == "w", has_state=True, model_state=jax.ShapeDtypeStruct((), "float32"),
    )  # fmt: skip
    assert len(found) == 2 and all(each.as_planned and each.simulation.step_s > each.bound.step_s for each in found)
    sums, gathers = 4 * 512**2, 2 * 512**2
    assert found[0].bound.all_reduce_s == Network(0.1).seconds("all-reduce", (sums + gathers) / 2, range(2))


def test_what_a_reader_must_know_is_noted(found):
    bucketed, auto = found
    assert bucketed.as_planned is True and auto.as_planned is None
    assert "in tf32, simulated" in bucketed.title
    said = "the 60.0 GB that JAX takes of a GPU by default"
    assert not any(said in note for note in bucketed.notes)
    large = dataclasses.replace(bucketed, memory={**bucketed.memory, "peak": 61 * 10**9})
    assert any(said in note for note in large.notes)
    bound = dataclasses.replace(bucketed.bound, compute_s=bucketed.simulation.compute_s / 1.03)
    slower = dataclasses.replace(bucketed, bound=bound)
    assert slower.notes == ["computes 3.0% longer than the same step without communication"]
    fewer = dataclasses.replace(bucketed, planned=bucketed.planned[1:])
    other = dataclasses.replace(bucketed, is_held_as_planned=False)
    for each, what in ((fewer, "collectives"), (other, "bytes of parameters or optimizer state")):
        assert each.as_planned is False and f"compiled to other {what} than planned" in each.notes


@pytest.fixture
def compiles_to(monkeypatch):
    """Sets how much memory every program takes that is compiled."""

    def needs(peak_bytes):
        names = "argument", "output", "alias", "temp"
        sizes = dict.fromkeys((f"{name}_size_in_bytes" for name in names), 0) | {"temp_size_in_bytes": peak_bytes}
        memory = SimpleNamespace(**sizes)
        program = TargetProgram(targets.target(TARGET), load_fixture("gpu-naive-jax0.10"), memory)
        for name in ("start_compile_without_communication", "start_compile"):
            monkeypatch.setattr(targets, name, lambda *args: SimpleNamespace(result=lambda: program))

    return needs


def test_a_step_too_large_says_by_how_much(compiles_to):
    compiles_to(80_100_000_000)
    with pytest.raises(ValueError, match=r"^a step of naive needs 80.1 GB .*: 0.1 GB too much"):
        inspected(["naive"], 8, "h100:8")


def test_frozen_parameters_have_no_optimizer_state(compiles_to):
    """45 GB of them fit in 80."""

    def loss_fn(params, batch):
        return jnp.mean(batch["x"] * params["w"].sum()) * params["frozen"][0, 0].astype("float32")

    compiles_to(0)
    eight = jax.ShapeDtypeStruct((8,), "float32")
    params = {"frozen": jax.ShapeDtypeStruct((150_000, 150_000), "bfloat16"), "w": eight}
    (naive,) = jaxddp.inspect(
        loss_fn, optax.adamw(1e-3), params, {"x": eight}, strategies="naive", trainable=lambda name: name == "w"
    )
    assert naive.memory["parameters"] == 45_000_000_000 + 32


def test_xlas_own_step_takes_no_options_of_a_trainer():
    with pytest.raises(ValueError, match="^strategy 'auto' must come without options of Trainer, not num_microbatches"):
        inspected(["auto"], 2, num_microbatches=2)
