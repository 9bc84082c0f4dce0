"""Masters in one dtype, the loss in another: every strategy follows one recipe, and holds and sends what it says."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.comparison_test import compiled_as_planned, drawn, on_one_device, trained
from jaxddp.instruments.inspect import DeviceBytes, held_bytes, step_memory
from jaxddp.strategy import Masters

NUM_RANKS = 4
SHARDED = jaxddp.zero3(min_shard_elements=0)
STRATEGIES = {"bucketed": jaxddp.bucketed(), "zero2": jaxddp.zero2(), "zero3": SHARDED}


def make(loss_fn, strategy, num_ranks=NUM_RANKS, optimizer=None, compute_dtype=jnp.bfloat16, **options):
    optimizer, mesh = optimizer or optax.adamw(1e-2), jaxddp.data_mesh(num_ranks)
    return jaxddp.Trainer(loss_fn, optimizer, strategy, mesh, compute_dtype=compute_dtype, **options)


def mlp_loss(params, batch):
    dense = jaxddp.layer(lambda kernel, x: jnp.tanh(x @ kernel))
    x = batch["x"].astype(params["first"].dtype)
    for kernel in params.values():
        x = dense(kernel, x)
    return jnp.mean((x.astype(batch["x"].dtype) - batch["x"]) ** 2)


SHAPES = {"first": (8, 16), "second": (16, 16), "third": (16, 8)}
NUM_ELEMENTS = 8 * 16 + 16 * 16 + 16 * 8


def mlp_params(dtype=np.float32):
    return drawn(0, dtype, **SHAPES)


def mlp_batch(step=0, rows=16):
    return {"x": np.random.default_rng(step).normal(size=(rows, 8)).astype(np.float32)}


def exact_loss(params, batch):
    """Its gradient for one example, 2 x w with x a power of two, is exact in any dtype: no compiler can round it."""
    seen.append({name: str(leaf.dtype) for name, leaf in params.items()})
    squares = sum(jnp.sum(batch["x"][:, None] * params[name].reshape(1, -1) ** 2) for name in ("w", "b", "scale"))
    return squares / batch["x"].size * params["table"].sum().astype(squares.dtype) + params["frozen"]


seen = []


def recipe(params, batches, optimizer, max_grad_norm):
    """Single-device training: cast, gradient of each example, mean in float64, clip, update of the masters."""
    others = {"table": params["table"], "frozen": jnp.float32(params["frozen"])}

    def mean_loss(masters, batch):
        def loss(masters, x):
            return exact_loss(jax.tree.map(jnp.float32, masters) | others, {"x": x[None]}).astype(jnp.float64)

        each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*batch["x"].shape, *leaf.shape)), masters)
        return jnp.mean(jax.vmap(loss)(each, batch["x"]))

    masters = {name: leaf for name, leaf in params.items() if name not in others}
    return on_one_device(mean_loss, masters, batches, optax.chain(optax.clip_by_global_norm(max_grad_norm), optimizer))


@pytest.mark.parametrize(("name", "num_microbatches"), [("bucketed", 1), ("zero2", 2), ("zero3", 2)])
def test_every_strategy_is_the_recipe_on_one_device(name, num_microbatches):
    with jax.enable_x64(True):
        params = drawn(1, w=(5, 3), b=7, scale=(), frozen=()) | {"table": np.array([3, -2])}
        optimizer = optax.adamw(1e-2, weight_decay=0.1)
        draws = [np.random.default_rng(step).integers(-3, 4, NUM_RANKS * num_microbatches) for step in range(5)]
        batches = [{"x": 2.0 ** powers.astype(np.float32)} for powers in draws]
        options = {"num_microbatches": num_microbatches, "max_grad_norm": 3.0}
        trainer = make(
            exact_loss, STRATEGIES[name], optimizer=optimizer, compute_dtype=jnp.float32,
            trainable=lambda name: name not in ("table", "frozen"), **options,
        )  # fmt: skip
        state = trainer.init(params)
        seen.clear()
        for batch in batches:
            state, metrics = trainer.step(state, batch)
            assert float(metrics["grad_norm"]) > 3.0
        dtypes = {"table": "int64", **dict.fromkeys(("w", "b", "scale", "frozen"), "float32")}
        assert all(found == dtypes for found in seen)
        jaxddp.check_replicas(trainer, state)
        found, wanted = trainer.params(state), recipe(params, batches, optimizer, 3.0)
        assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, params)
        np.testing.assert_array_equal(found["frozen"], params["frozen"])  # not what the cast left of it
        for leaf_name, leaf in wanted.items():
            # Gradients are exact in float32; sums, clipping and AdamW round in float64, 5 steps of 1e-2.
            np.testing.assert_allclose(found[leaf_name], leaf, rtol=0, atol=1e-13)
        assert isinstance(state.opt_state, Masters) == (name != "zero3")
        for leaf in ("w", "b", "scale") if name != "zero3" else ():
            np.testing.assert_array_equal(state.params[leaf], found[leaf].astype(np.float32))


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_bytes_from_step_to_step(strategy):
    """AdamW with float32 masters: 2 + 12, 2 + 12 / N or 12 / N bytes a parameter, a count, the step and the key."""
    trainer = make(mlp_loss, strategy)
    state, batch = trainer.abstract_state(mlp_params()), mlp_batch()
    parameter, others = 2, 12 if "zero" not in strategy.name else 12 // NUM_RANKS
    if strategy.name == "zero3":
        parameter, others = 1, 8 // NUM_RANKS  # of the masters, a quarter
    held = DeviceBytes(parameter * NUM_ELEMENTS, others * NUM_ELEMENTS + 4, 4 + 8)
    program = trainer.compile(state, batch)
    assert step_memory(program, state)[:3] == held[:3]
    assert held_bytes(trainer.layout(state))[:2] == held[:2]
    assert program.memory_analysis().argument_size_in_bytes == sum(held) + batch["x"].nbytes // NUM_RANKS
    state = trainer.init(mlp_params())
    state, _ = trainer.step(state, batch)
    arrays = jax.tree.leaves(state._replace(step=(), key=()))
    assert sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays) == sum(held[:2])


def gathered_and_summed(collectives):
    gathered = sum(num_bytes for kind, num_bytes in collectives if kind == "all-gather")
    return gathered, sum(num_bytes for _, num_bytes in collectives) - gathered


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [jaxddp.bucketed(5e-4), jaxddp.zero2(5e-4), SHARDED])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "sum_bytes"),
    [(jnp.float16, None, 4), (jnp.float16, jnp.float16, 2), (jnp.bfloat16, jnp.bfloat16, 4)],  # summed in float32 here
)
def test_gathers_take_the_compute_dtype_and_sums_that_of_gradients(strategy, dtype, grad_dtype, sum_bytes):
    trainer = make(mlp_loss, strategy, compute_dtype=dtype, grad_dtype=grad_dtype)
    state = trainer.abstract_state(mlp_params())
    compiled = compiled_as_planned(trainer, state, mlp_batch())
    # zero3 gathers the second unit again for the backward; the last is kept.
    gathered = {"zero2": 2 * NUM_ELEMENTS, "zero3": 2 * (NUM_ELEMENTS + 16 * 16)}.get(strategy.name, 0)
    assert gathered_and_summed(compiled) == (gathered, sum_bytes * NUM_ELEMENTS)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [jaxddp.bucketed(), jaxddp.zero1(None), SHARDED], ids=lambda one: one.name)
@pytest.mark.parametrize("grad_dtype", [jnp.float16, jnp.float32])
def test_full_parameters_are_gathered_in_their_own_dtypes_whatever_that_of_gradients(strategy, grad_dtype):
    params = {name: leaf.astype(np.float16 if name == "second" else np.float32) for name, leaf in mlp_params().items()}
    trainer = make(mlp_loss, strategy, compute_dtype=None, grad_dtype=grad_dtype)
    state = trainer.abstract_state(params)
    compiled = compiled_as_planned(trainer, state, mlp_batch())
    times = {"zero1": 1, "zero3": 2}.get(strategy.name, 0)  # the second unit again for the backward
    gathered = times * 2 * 16 * 16 + (times > 0) * 4 * 2 * 8 * 16
    assert gathered_and_summed(compiled) == (gathered, jnp.dtype(grad_dtype).itemsize * NUM_ELEMENTS)
    state, _ = trainer.step(trainer.init(params), mlp_batch())
    assert {name: leaf.dtype for name, leaf in state.params.items()} == {k: v.dtype for k, v in params.items()}


def test_a_checkpoint_holds_masters_for_any_strategy_and_number_of_ranks(tmp_path):
    params = mlp_params()
    on_4, on_2 = make(mlp_loss, jaxddp.zero1()), make(mlp_loss, jaxddp.bucketed(), 2)
    there, _ = trained(on_4, on_4.init(params), map(mlp_batch, range(3)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(on_4, there)
        with np.load(tmp_path / "3" / "state.npz") as saved:
            assert saved["params.first"].dtype == np.float32
        here, _ = checkpoints.restore(on_2, params)
        back, _ = checkpoints.restore(on_4, params)
        wide, _ = checkpoints.restore(make(mlp_loss, SHARDED, 3, compute_dtype=None), params)
    jax.tree.map(np.testing.assert_array_equal, on_2.params(here), on_4.params(there))
    jax.tree.map(np.testing.assert_array_equal, here.params, there.params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(wide.params)} == {"float32"}
    there, measured = trained(on_4, there, map(mlp_batch, range(3, 6)))
    back, again = trained(on_4, back, map(mlp_batch, range(3, 6)))
    jax.tree.map(np.testing.assert_array_equal, (back.params, back.opt_state), (there.params, there.opt_state))
    here, measured_here = trained(on_2, here, map(mlp_batch, range(3, 6)))
    assert again["loss"] == measured["loss"]
    # 3 steps of gradients that bfloat16 rounds (2^-9) over other examples together: the loss moves by far less.
    np.testing.assert_allclose(measured_here["loss"], measured["loss"], rtol=1e-2)


@pytest.mark.parametrize("name", ["bucketed", "zero3"])
def test_evaluation_computes_in_the_compute_dtype_and_model_state_keeps_its_own(name):
    found = []

    def loss_fn(params, model_state, batch, key=None):
        found.append((str(params["first"].dtype), str(model_state["mean"].dtype)))
        loss = mlp_loss(params, batch)
        return loss, {"mean": 0.9 * model_state["mean"] + 0.1 * loss.astype(jnp.float32)}

    trainer = make(loss_fn, STRATEGIES[name], has_state=True)
    state = trainer.init(mlp_params(), model_state={"mean": np.zeros((), np.float32)})
    state, _ = trainer.step(state, mlp_batch())
    loss = trainer.evaluate(state, mlp_batch())

    trainer.evaluate(state, mlp_batch(), lambda *args: (loss_fn(*args), {"x": jaxddp.Mean(args[2]["x"])})[1])
    assert len(found) > 2
    assert set(found) == {("bfloat16", "float32")}
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trainer.params(state))
    assert float(loss) == pytest.approx(float(mlp_loss(halves, mlp_batch())), rel=1e-2)  # sums of bfloat16


@pytest.mark.parametrize("strategy", [jaxddp.zero1(), SHARDED], ids=lambda one: one.name)
def test_masters_that_are_replaced_are_what_is_trained_on(strategy):
    trainer, batch = make(mlp_loss, strategy), mlp_batch()
    state, expected = trainer.init(mlp_params()), trainer.init(jax.tree.map(lambda leaf: 2 * leaf, mlp_params()))
    replaced = trainer.with_masters(state, jax.tree.map(lambda leaf: 2 * leaf, trainer.masters(state)[0]))
    jax.tree.map(np.testing.assert_array_equal, replaced.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, trainer.params(replaced), trainer.params(expected))
    assert trainer.evaluate(replaced, batch) == trainer.evaluate(expected, batch)
    assert trainer.step(replaced, batch)[1]["loss"] == trainer.step(expected, batch)[1]["loss"]


def test_trained_parameters_of_16_bits_are_warned_of():
    """They lose updates that are smaller than half their last place."""
    options = {"compute_dtype": None, "grad_dtype": jnp.float32}
    with pytest.warns(UserWarning, match=r"parameter 'first' has 16 bits or fewer.*compute_dtype"):
        make(mlp_loss, jaxddp.zero3(), **options).init(mlp_params("bfloat16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(mlp_loss, jaxddp.zero3()).init(mlp_params())
        frozen = make(mlp_loss, jaxddp.zero3(), trainable=lambda name: name == "v", **options)
        frozen.init(mlp_params("bfloat16") | {"v": np.ones(3, np.float32)})


def test_without_x64_float64_is_float32():
    trainer = make(mlp_loss, jaxddp.zero1(), compute_dtype=jnp.float64)
    state, _ = trainer.step(trainer.init(mlp_params()), mlp_batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
