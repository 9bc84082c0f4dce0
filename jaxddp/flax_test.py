"""Flax models: the same training as on one device, dropout by rank and step, evaluation without it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

import jaxddp
from jaxddp.comparison_test import assert_near, drawn, refusal, trained
from jaxddp.flax import from_linen, from_nnx

pytestmark = pytest.mark.usefixtures("x64")
WIDTH, NUM_RANKS = 6, 4


class NnxNet(nnx.Module):
    def __init__(self, rate):
        rngs = nnx.Rngs(params=0, dropout=1)
        types = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        self.first = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs, **types)
        # Over the ranks, so that the training is that of one device.
        self.norm = nnx.BatchNorm(WIDTH, axis_name="data", rngs=rngs, **types)
        self.norm.mean = nnx.BatchStat(jnp.zeros(WIDTH, jnp.float64))  # float32 whatever its dtypes are
        self.norm.var = nnx.BatchStat(jnp.ones(WIDTH, jnp.float64))
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs, **types)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


class LinenNet(nn.Module):
    rate: float

    @nn.compact
    def __call__(self, x, is_training):
        types = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        x = nn.Dense(WIDTH, use_bias=False, **types)(x)
        x = nn.BatchNorm(use_running_average=not is_training, axis_name="data", **types)(x)
        x = nn.Dropout(self.rate, deterministic=not is_training)(jnp.tanh(x))
        # Boxed with the name of an axis that this mesh does not have.
        return nn.Dense(1, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")), **types)(x)


def of_nnx(rate):
    return from_nnx(NnxNet(rate), lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))


def linen_loss(apply, batch, is_training):
    return jnp.mean((apply(batch["x"], is_training) - batch["y"]) ** 2)


def of_linen(rate, loss=linen_loss):
    module = LinenNet(rate)
    variables = module.init(jax.random.key(0), jnp.ones((2, WIDTH)), False)
    # Its statistics begin in float32, whatever its dtypes are.
    return from_linen(module, freeze(jax.tree.map(lambda leaf: leaf.astype(jnp.float64), variables)), loss)


both = pytest.mark.parametrize("make", [of_nnx, of_linen])


def batch():
    return drawn(x=(24, WIDTH), y=(24, 1))


def trainer_of(loss_fn, strategy, num_ranks):
    return jaxddp.Trainer(loss_fn, optax.adamw(1e-2), strategy, jaxddp.data_mesh(num_ranks), has_state=True)


@pytest.mark.sample
@both
@pytest.mark.parametrize("strategy", [jaxddp.bucketed(), jaxddp.zero3(min_shard_elements=0)], ids=["bucketed", "zero3"])
def test_ranks_train_as_one_device(make, strategy):
    loss_fn, params, model_state = make(0.0)
    found = []
    for num_ranks in (1, NUM_RANKS):
        trainer = trainer_of(loss_fn, strategy, num_ranks)
        state, _ = trained(trainer, trainer.init(params, model_state=model_state), [batch()] * 3)
        found.append((trainer.params(state), trainer.model_state(state), trainer.evaluate(state, batch())))
    assert_near(*found)
    moved = jax.tree.map(lambda old, new: bool(jnp.any(old != new)), model_state, found[0][1])
    assert all(jax.tree.leaves(moved))


def test_what_a_layer_changes_in_its_module_is_kept_and_what_it_adds_is_refused():
    class Marked(NnxNet):
        def __init__(self, rate):
            super().__init__(rate)
            self.norm.aside = nnx.BatchStat((jnp.zeros(1), jnp.zeros(2)))  # two leaves before those that change

        def __call__(self, x):
            mark = jaxddp.layer(lambda part, x: part(x))
            return mark(self.last, mark(self.norm, jnp.tanh(mark(self.first, x))))

    class Sown(NnxNet):
        def __call__(self, x):
            def first(model, x):
                model.size = nnx.Intermediate(jnp.mean(x**2))  # as Module.sow does
                return model.first(x)

            return self.last(jaxddp.layer(first)(self, x))

    def squares(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    def listed(params, batch):
        sizes = []
        jaxddp.layer(lambda w, x, sizes: sizes.append(x @ w))(params["w"], batch["x"], sizes)
        return sum(map(jnp.sum, sizes), 0.0)

    def replaced(params, batch):
        seen = {"size": np.zeros(2)}
        jaxddp.layer(lambda w, x, seen: seen.update(size=jnp.sum(x @ w, 0)))(params["w"], batch["x"], seen)
        return jnp.sum(seen["size"])

    found, zero3 = [], jaxddp.zero3(min_shard_elements=0)
    for strategy in (jaxddp.bucketed(), zero3):
        loss_fn, params, model_state = from_nnx(Marked(0.0), squares)
        trainer = trainer_of(loss_fn, strategy, NUM_RANKS)
        state, _ = trained(trainer, trainer.init(params, model_state=model_state), [batch()] * 2)
        found.append((trainer.params(state), trainer.model_state(state)))
    assert_near(*found)
    assert float(jnp.max(jnp.abs(found[0][1]["norm"]["mean"]))) > 1e-3

    loss_fn, params, model_state = from_nnx(Sown(0.0), squares)
    trainer = trainer_of(loss_fn, zero3, NUM_RANKS)
    assert "must not add to" in refusal(trainer.plan, trainer.init(params, model_state=model_state), batch())
    for loss_fn, said in ((listed, "must not add to"), (replaced, "must return what it changes")):
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), zero3, jaxddp.data_mesh(2))
        assert said in refusal(trainer.plan, trainer.init({"w": np.ones((WIDTH, 2))}), batch())


@both
def test_dropout_differs_by_rank_and_step_and_evaluation_has_none(make):
    loss_fn, params, model_state = make(0.5)
    _, _, without = make(0.0)
    assert jax.tree.structure(without) == jax.tree.structure(model_state)
    same = {name: np.tile(leaf[:6], (NUM_RANKS, 1)) for name, leaf in batch().items()}  # the same rows on every rank

    def losses(params, model_state, batch, key=None):
        loss, new = loss_fn(params, model_state, batch, key)
        return loss, (new, jaxddp.PerExample(jnp.full(6, loss)))

    trainer = jaxddp.Trainer(
        losses, optax.sgd(0.0), jaxddp.bucketed(), jaxddp.data_mesh(NUM_RANKS), has_state=True, has_aux=True
    )
    state = trainer.init(params, model_state=model_state)
    seen = []
    for _ in range(2):
        state, metrics = trainer.step(state, same)
        seen += metrics["aux"][::6].tolist()
    assert len(set(seen)) == 2 * NUM_RANKS
    loss, each = trainer.evaluate(state, same)
    assert len(set(each.tolist())) == 1 and float(each[0]) == pytest.approx(float(loss), rel=1e-12)


def test_a_stack_of_nnx_layers_draws_a_mask_for_each():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=2)
            @nnx.vmap
            def layers(rngs):
                return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

            self.layers = layers(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer.layers[1](x), in_axes=(0, None))(self.layers, x)

    def loss(model, batch):
        first, second = model(batch["x"])
        return jnp.mean((first - second) ** 2)

    loss_fn, params, model_state = from_nnx(Stack(nnx.Rngs(params=0, dropout=1)), loss)
    trainer = trainer_of(loss_fn, jaxddp.zero1(), NUM_RANKS)
    state, metrics = trainer.step(trainer.init(params, model_state=model_state), batch())
    assert metrics["loss"] > 1e-3 and trainer.evaluate(state, batch()) == 0


def test_each_call_of_a_linen_module_draws_a_mask_of_its_own():
    def loss(apply, batch, is_training):
        return jnp.mean((apply(batch["x"], is_training) - apply(batch["x"], is_training)) ** 2)

    loss_fn, params, model_state = of_linen(0.5, loss)
    trainer = trainer_of(loss_fn, jaxddp.bucketed(), NUM_RANKS)
    _, metrics = trainer.step(trainer.init(params, model_state=model_state), batch())
    assert metrics["loss"] > 1e-3


def test_a_forgotten_has_state_is_named():
    loss_fn, params, _ = from_nnx(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), lambda model, batch: jnp.mean(model(batch)))
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(1.0), jaxddp.bucketed(), jaxddp.data_mesh(2))
    assert "has_state=True" in refusal(trainer.step, trainer.init(params), np.ones((4, 3), np.float32))


def test_a_model_that_is_trained_afterwards_leaves_the_parameters_as_they_were():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    loss_fn, params, model_state = from_nnx(model, lambda model, batch: jnp.mean(model(batch)))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda model: jnp.sum(model.kernel[...]))(model))
    assert np.array_equal(model.kernel[...], kernel - 1)
    (found,) = (leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2)
    assert np.array_equal(found, kernel)
