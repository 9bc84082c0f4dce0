"""What users outside of the project met: each by its smallest input, against JAX on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxddp
from jaxddp.comparison_test import assert_near, compiled_as_planned, grid, on_one_device, refusal, trained

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
SHARDED = jaxddp.zero3(min_shard_elements=0)
LEAVES = jaxddp.zero1(shard="leaves")
STRATEGIES = {"bucketed": jaxddp.bucketed(), "zero2": jaxddp.zero2(), "zero3": SHARDED}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
BATCH = np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4) / 32
PARAMS = {"a": np.ones((4, 4), np.float32) / 4, "b": np.ones(4, np.float32)}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)


def make(strategy, loss_fn=loss_fn, optimizer=SGD, num_ranks=2, mesh=None, **options):
    return jaxddp.Trainer(loss_fn, optimizer, strategy, mesh or jaxddp.data_mesh(num_ranks), **options)


explicit = functools.partial(grid, 2, names=("data",), axis_type=AxisType.Explicit)
assert_close = functools.partial(assert_near, atol=1e-6)  # as sums in float32 of a few numbers around 1 are


# Steps and their states


def test_a_part_of_a_donated_state_that_is_put_back_is_refused_where_xla_would_end_the_process():
    trainer = make(jaxddp.bucketed(), optimizer=ADAM)
    for field in ("params", "opt_state", "key"):
        before = trainer.init(PARAMS)
        state, _ = trainer.step(before, BATCH)
        assert field in refusal(trainer.step, state._replace(**{field: getattr(before, field)}), BATCH)


def with_state(params, model_state, batch):
    return loss_fn(params, batch), model_state


OTHERS = {  # the trainer that made the state, the one that is given it, and the option that differs
    "bucketed to zero1": (make(jaxddp.bucketed(), optimizer=ADAM), make(jaxddp.zero1(), optimizer=ADAM), "strategy"),
    "zero3 to bucketed": (make(SHARDED, optimizer=ADAM), make(jaxddp.bucketed(), optimizer=ADAM), "strategy"),
    "zero3 by size": (make(SHARDED, optimizer=ADAM), make(jaxddp.zero3(), optimizer=ADAM), "strategy"),
    "elements to leaves": (make(jaxddp.zero1(), optimizer=ADAM), make(LEAVES, optimizer=ADAM), "strategy"),
    "optimizer": (make(jaxddp.zero1(), optimizer=ADAM), make(jaxddp.zero1()), "optimizer"),
    "trainable": (make(jaxddp.zero1(), optimizer=ADAM, trainable=lambda name: name == "a"),
                  make(jaxddp.zero1(), optimizer=ADAM), "trainable"),
    "without a model state": (make(jaxddp.flat()), make(jaxddp.flat(), with_state, has_state=True), "has_state"),
    "with a model state": (make(jaxddp.flat(), with_state, has_state=True), make(jaxddp.flat()), "has_state"),
    "without masters": (make(jaxddp.flat()), make(jaxddp.flat(), compute_dtype=jnp.bfloat16), "compute_dtype"),
    "with masters": (make(jaxddp.flat(), compute_dtype=jnp.bfloat16), make(jaxddp.flat()), "compute_dtype"),
    "on other ranks": (make(SHARDED, num_ranks=4), make(SHARDED), "mesh"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_trainer_is_refused(name):
    first, second, named = OTHERS[name]
    state = first.init(PARAMS, **({"model_state": {"n": np.zeros(2, np.float32)}} if first.has_state else {}))
    with pytest.raises(ValueError, match=rf"\b{named}\b|input shardings that disagree"):
        second.step(state, BATCH)


@pytest.mark.parametrize("strategy", [jaxddp.bucketed(), jaxddp.zero1()], ids=lambda one: one.name)
def test_a_state_of_another_optimizer_or_other_parameters_is_refused_by_a_trainer_that_has_a_plan(strategy):
    trainer, other = make(strategy, optimizer=ADAM), make(strategy)
    trainer.step(trainer.init(PARAMS), BATCH)
    for state in (other.init(PARAMS), trainer.init(PARAMS)._replace(params={"v": PARAMS["a"]})):
        for method in (trainer.step, trainer.evaluate, trainer.plan, trainer.compile):
            assert refusal(method, state, BATCH).startswith("state must be one that this trainer has made")


def test_a_state_is_taken_by_a_trainer_that_differs_in_nothing_it_holds():
    state = make(jaxddp.naive(), max_grad_norm=1.0).init(PARAMS)
    second = make(jaxddp.bucketed(), compute_dtype=jnp.float32, nonfinite="skip")
    state, _ = second.step(state, BATCH)
    assert_close(second.params(state), on_one_device(loss_fn, PARAMS, [BATCH], SGD))


def test_a_step_within_a_program_or_without_jit_is_refused():
    trainer = make(jaxddp.bucketed())
    state = trainer.init(PARAMS)
    assert jax.tree.structure(jax.eval_shape(trainer.init, PARAMS)) == jax.tree.structure(state)
    for within in (jax.jit(trainer.step), lambda state, batch: jax.lax.scan(trainer.step, state, batch[None])):
        with pytest.raises(jax.errors.ConcretizationTypeError, match="is_deleted"):
            within(state, BATCH)
    with jax.disable_jit(), pytest.raises(ValueError, match="Disable jit is not supported"):
        trainer.step(state, BATCH)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), LEAVES], ids=[*STRATEGIES, "leaves"])
@pytest.mark.parametrize("size", [2, 3])
def test_under_a_context_mesh_of_explicit_axes(strategy, size):
    optimizer, batch = optax.chain(SGD, jaxddp.params_ema(0.0)), BATCH[:6]
    with jax.set_mesh(grid(size, names=("data",), axis_type=AxisType.Explicit)):
        trainer = make(strategy, optimizer=optimizer, num_ranks=3)  # which divide no dimension
        state, _ = trainer.step(trainer.init(PARAMS), batch)
        found = jax.device_get([trainer.params(state), trainer.params(trainer.averaged(state))])
        trainer.evaluate(state, batch), trainer.opt_state(state), jaxddp.check_replicas(trainer, state)
    assert_close(found, [on_one_device(loss_fn, PARAMS, [batch], SGD)] * 2)


@each_strategy
def test_on_a_mesh_of_explicit_axes_beside_a_program_of_the_users(strategy, tmp_path):
    mesh, expected = explicit(), on_one_device(loss_fn, PARAMS, [BATCH] * 3, SGD)
    trainer = make(strategy, mesh=mesh)

    @jax.jit
    def shifted(params, batch):  # JAX refuses arrays of another mesh here
        return jnp.sum(batch) * 0 + jax.tree.map(lambda leaf: leaf * 1, params)["a"].sum()

    with jax.set_mesh(mesh):
        batch = jax.device_put(BATCH, jax.NamedSharding(mesh, P("data")))
        state = trainer.init(PARAMS)
        for _ in range(2):
            state, metrics = trainer.step(state, batch)
        assert np.isfinite(shifted(trainer.params(state), batch)) and np.isfinite(shifted(state.params, batch))
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves((state, metrics))} == {mesh}
    assert np.isfinite(trainer.evaluate(state, BATCH))
    with jaxddp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state)
        restored, _ = checkpoints.restore(trainer, PARAMS)
    state, _ = trainer.step(restored, BATCH)
    assert_close(jax.device_get(trainer.params(state)), expected)


@pytest.mark.skipif(not hasattr(P(), "unreduced"), reason="this JAX types no sums that are not reduced")
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_typed_unreduced_are_summed_as_planned(check_vma):
    mesh, strategy = explicit(), jaxddp.bucketed()
    plan = jaxddp.plan_gradients(strategy, jax.grad(loss_fn), PARAMS, BATCH[:2])

    @jax.jit
    def terms(params, batch):  # of each rank, of a sum
        params = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P(*[None] * leaf.ndim, reduced={"data"})), params)
        return jax.grad(loss_fn)(params, batch)

    with jax.set_mesh(mesh):
        put = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, P()))
        grads = terms(jax.tree.map(put, PARAMS), jax.device_put(BATCH, jax.NamedSharding(mesh, P("data"))))
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, grads)
    assert all(spec.unreduced == {"data"} for spec in jax.tree.leaves(specs, is_leaf=lambda one: isinstance(one, P)))
    total = jax.shard_map(
        lambda grads: jaxddp.sync_gradients(grads, plan, "data", denominator=1),
        mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    compiled = jaxddp.jit(total, strategy).lower(grads).compile()
    assert_close(jax.device_get(compiled(grads)), jax.grad(loss_fn)(PARAMS, BATCH))
    assert jaxddp.collectives(compiled).pairs == [("all-reduce", 4 * sum(leaf.size for leaf in PARAMS.values()))]


def test_of_mixed_axes_those_of_parameters_are_left_to_xla():
    mesh = grid(2, 2, axis_type=AxisType.Explicit)
    specs = {"a": P(None, "model"), "b": P("model")}
    trainer = make(jaxddp.zero1(), mesh=mesh, param_specs=specs)
    state, _ = trainer.step(trainer.init(PARAMS), BATCH)
    assert_close(jax.device_get(trainer.params(state)), on_one_device(loss_fn, PARAMS, [BATCH], SGD))


def test_integers_of_a_batch_that_would_not_fit_are_refused():
    trainer = make(jaxddp.bucketed(), lambda params, batch: jnp.mean(params["b"][batch["id"] % 4]))
    state = trainer.init(PARAMS)
    small = {"id": np.arange(4, dtype=np.int64)}  # NumPy's own dtype: taken where the values fit
    assert float(trainer.evaluate(state, small)) == 1.0
    for use in (trainer.step, trainer.compile, trainer.programs(state).step_function):
        assert str(2**32 + 1) in refusal(use, state, {"id": small["id"] + 2**32 - 2})
    with jax.enable_x64(True):
        trainer = make(jaxddp.bucketed(), lambda params, batch: jnp.mean(params["b"] * batch["id"].mean()))
        assert float(trainer.evaluate(trainer.init(PARAMS), {"id": small["id"] + 2**40})) == 2**40 + 1.5


# Losses and what is measured


@pytest.mark.sample
@each_strategy
@pytest.mark.parametrize("bad", [0, 7], ids=["of the first rank", "of the last"])
def test_a_weight_that_is_nan_makes_the_loss_nan(strategy, bad):
    weights = np.ones(8, np.float32)
    weights[bad] = np.nan

    def loss_fn(params, batch):
        return jaxddp.Weighted(jnp.sum(batch["x"] @ params["a"]), jnp.sum(batch["weight"]))

    trainer = make(strategy, loss_fn, num_microbatches=2)
    state = trainer.init({"a": PARAMS["a"]})
    batch = {"x": BATCH, "weight": weights}
    assert np.isnan(trainer.evaluate(state, batch))
    _, metrics = trainer.step(state, batch)
    assert np.isnan(metrics["loss"]) and np.isnan(metrics["grad_norm"])


def test_integer_weights_are_not_rounded_in_float64():
    with jax.enable_x64(True):
        batch = {"x": np.array([1e7, 3e7, 5e7, 7e7]), "weight": np.array([2**24 + 1, 2**25 + 1, 2**26 + 3, 1])}
        trainer = make(
            jaxddp.zero1(), lambda w, batch: jaxddp.Weighted(jnp.sum(batch["x"] * w), jnp.sum(batch["weight"]))
        )
        state, metrics = trainer.step(trainer.init(np.ones(())), batch)
        expected = batch["x"].sum() / batch["weight"].sum()
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-15)  # a quotient of exact sums
        np.testing.assert_allclose(trainer.params(state), 1 - 0.1 * expected, rtol=1e-15)


def test_eval_fn_takes_weighted_values_of_examples():
    def eval_fn(params, batch):
        return {"loss": jaxddp.Weighted(batch["x"].sum(1) * batch["weight"], batch["weight"])}

    trainer = make(jaxddp.bucketed(), num_ranks=4)
    weight = np.array([3, 0, 1, 2, 5], np.float32)  # not a multiple of the ranks: some are padded
    batch = {"x": BATCH[:5], "weight": weight}
    found = trainer.evaluate(trainer.init(PARAMS), [batch, batch], eval_fn)
    np.testing.assert_allclose(found["loss"], BATCH[:5].sum(1) @ weight / weight.sum(), rtol=1e-6)  # in float32


SCHEDULES = {"elements": jaxddp.zero1(), "zero3": SHARDED, "leaves": LEAVES, "whole": jaxddp.bucketed()}
FREE = optax.contrib.schedule_free_sgd(0.3)


@functools.cache
def trained_free_of_schedules():
    """Parameters and state of one device, after three steps on the first six examples."""

    @jax.jit
    def step(params, state):
        updates, state = FREE.update(jax.grad(loss_fn)(params, BATCH[:6]), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, FREE.init(PARAMS)
    for _ in range(3):
        params, state = step(params, state)
    return params, state


@pytest.mark.parametrize("strategy", SCHEDULES.values(), ids=SCHEDULES)
def test_the_optimizers_state_is_given_whole_for_schedule_free_evaluation(strategy):
    (params, state), batch = trained_free_of_schedules(), BATCH[:6]
    trainer = make(strategy, optimizer=FREE, num_ranks=3)
    ours, _ = trained(trainer, trainer.init(PARAMS), [batch] * 3)
    found = trainer.opt_state(ours)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert_close(found, state)
    averaged = optax.contrib.schedule_free_eval_params(found, trainer.params(ours))
    expected = loss_fn(optax.contrib.schedule_free_eval_params(state, params), batch)
    assert abs(expected - loss_fn(params, batch)) > 1e-3
    np.testing.assert_allclose(trainer.evaluate(trainer.init(averaged), batch), expected, rtol=1e-5)  # in float32


@pytest.mark.parametrize("strategy", [LEAVES, jaxddp.zero1(), SHARDED], ids=["leaves", "zero1", "zero3"])
def test_what_an_optimizer_of_no_updates_leaves_out_is_not_planned(strategy):
    trainer = make(strategy, optimizer=optax.set_to_zero())
    compiled_as_planned(trainer, trainer.init(PARAMS), BATCH)


# Units

tanh_of = jaxddp.layer(lambda w, x: jnp.tanh(x @ w))


@pytest.mark.sample
@pytest.mark.parametrize("uses", [2, 3])
@pytest.mark.parametrize("ends", [False, True], ids=["alone", "before another"])
def test_a_checkpointed_unit_used_several_times_in_a_row(uses, ends):
    def loss_fn(params, x):
        for _ in range(uses):
            x = jax.checkpoint(tanh_of)(params["a"], x)
        return jnp.sum(tanh_of(params["b"], x) if ends else x)

    params = {"a": PARAMS["a"], **({"b": PARAMS["a"]} if ends else {})}
    trainer = make(SHARDED, loss_fn)
    state, _ = trainer.step(trainer.init(params), BATCH)
    half = on_one_device(lambda params, x: loss_fn(params, x) / 2, params, [BATCH], SGD)  # the sum is of 2 ranks' means
    assert_close(trainer.params(state), half)
    compiled_as_planned(trainer, state, BATCH)


def test_a_callback_in_a_unit_computes_what_it_does_elsewhere():
    def on_host(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.tanh(np.asarray(x)), shape, jax.lax.stop_gradient(x))

    unit = jaxddp.layer(lambda w, x: x @ w + on_host(x @ w) * x)

    def loss_fn(params, x):
        return jnp.mean(unit(params["b"], unit(params["a"], x)) ** 2)

    params = {"a": PARAMS["a"], "b": PARAMS["a"] * 2}
    trainer = make(SHARDED, loss_fn)
    state, _ = trainer.step(trainer.init(params), BATCH)
    assert_close(trainer.params(state), on_one_device(loss_fn, params, [BATCH], SGD))


REPLICATED = {"flat": jaxddp.flat(), "zero1": jaxddp.zero1(), "zero3": SHARDED, "leaves": LEAVES}


@pytest.mark.parametrize("strategy", REPLICATED.values(), ids=REPLICATED)
def test_constant_gradients_count_once_under_replicas(strategy):
    def loss_fn(params, batch):
        return jnp.sum(params["a"] * 3.0) + jnp.mean(batch @ params["b"])

    trainer = make(strategy, loss_fn, mesh=jaxddp.data_mesh(4, replicas=2), num_microbatches=2)
    state, _ = trainer.step(trainer.init(PARAMS), BATCH)
    assert_close(trainer.params(state), on_one_device(loss_fn, PARAMS, [BATCH], SGD))
