import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.models import build


def regression_batch(length=24, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(length, 10)).astype(np.float32), "y": rng.normal(size=(length, 5)).astype(np.float32)}


def linear_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def linear_params():
    return {"w": jnp.asarray(np.random.default_rng(1).normal(size=(10, 5)), jnp.float32), "b": jnp.zeros(5)}


def make(loss_fn=linear_loss, strategy=None, num_ranks=4, optimizer=None, **options):
    return jaxddp.Trainer(
        loss_fn, optimizer or optax.sgd(0.1), strategy or jaxddp.bucketed(25), jaxddp.data_mesh(num_ranks), **options
    )


def assert_trees_close(ours, theirs, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), ours, theirs)


# How often it compiles


def test_one_compile_for_each_shape_of_batch_and_none_from_step_to_step():
    trainer = make(optimizer=optax.adamw(1e-2))
    state = trainer.init(linear_params())
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *args, **kwargs: compiles.append(event) if event.endswith("backend_compile_duration") else None
    )
    try:
        state, _ = trainer.step(state, regression_batch(24))
        assert len(compiles) == 1
        for seed in range(5):
            state, _ = trainer.step(state, regression_batch(24, seed))
        assert len(compiles) == 1
        state, _ = trainer.step(state, regression_batch(8))
        assert len(compiles) == 2
        trainer.compile(state, regression_batch(8))
        trainer.step(state, regression_batch(24))
        assert len(compiles) == 2
    finally:
        jax.monitoring.clear_event_listeners()


def test_compile_gives_the_very_executable_for_arrays_and_for_shapes():
    trainer = make()
    state, batch = trainer.init(linear_params()), regression_batch()
    shapes = jax.eval_shape(lambda: (state, jax.tree.map(jnp.asarray, batch)))
    assert trainer.compile(*shapes) is trainer.compile(state, batch)
    before = trainer.compile(state, batch)
    state, _ = trainer.step(state, batch)
    assert trainer.compile(state, batch) is before


def test_the_programs_size_does_not_grow_with_the_number_of_microbatches():
    sizes = []
    for num_microbatches in (3, 12, 48):
        trainer = make(num_microbatches=num_microbatches, num_ranks=2)
        state, batch = trainer.init(linear_params()), regression_batch(8 * num_microbatches)
        compiled = trainer.compile(state, batch)
        assert len(jaxddp.gradient_collectives(compiled)) == 1
        sizes.append(len(compiled.as_text().splitlines()))
    assert sizes[0] == sizes[1] == sizes[2]


# What it computes


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [jaxddp.naive(), jaxddp.bucketed(0.001)], ids=["naive", "bucketed"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_microbatches_and_ranks_change_nothing_but_the_order_of_sums(strategy, num_microbatches):
    loss_fn, params = build("toy")
    reference = make(loss_fn, num_ranks=1, optimizer=optax.adam(1e-2))
    trainer = make(loss_fn, strategy, optimizer=optax.adam(1e-2), num_microbatches=num_microbatches)
    ours, theirs = trainer.init(params), reference.init(params)
    for seed in range(5):
        ours, metrics = trainer.step(ours, regression_batch(seed=seed))
        theirs, expected = reference.step(theirs, regression_batch(seed=seed))
        # float32 sums of 24 examples in another order; Adam divides small differences by small moments.
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert_trees_close(trainer.params(ours), reference.params(theirs), atol=2e-5)
    assert int(ours.step) == 5


def test_an_embedding_is_accumulated_right_over_microbatches():
    """XLA has miscompiled the accumulation of scattered gradients in loops (openxla/xla#49143)."""

    def loss_fn(params, batch):
        return jnp.mean((params["embedding"][batch["token"]] @ params["w"] - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    params = {"embedding": rng.normal(size=(7, 4)).astype(np.float32), "w": rng.normal(size=(4, 1)).astype(np.float32)}
    batch = {"token": rng.integers(0, 7, 24), "y": rng.normal(size=(24, 1)).astype(np.float32)}
    results = []
    for num_ranks, num_microbatches in ((1, 1), (2, 6)):
        trainer = make(loss_fn, num_ranks=num_ranks, num_microbatches=num_microbatches)
        state, _ = trainer.step(trainer.init(params), batch)
        results.append(trainer.params(state))
    assert_trees_close(*results, atol=1e-6)  # one SGD step of gradients of order 1: the order of sums


def test_a_callers_arrays_stay_valid():
    params = linear_params()
    trainer = make()
    state = trainer.init(params)
    trainer.step(state, regression_batch())
    trainer.step(trainer.init(params), regression_batch())
    assert float(params["b"][0]) == 0
    numpy_params = jax.tree.map(np.array, linear_params())
    before = jax.tree.map(np.copy, numpy_params)
    trainer.step(trainer.init(numpy_params), regression_batch())
    jax.tree.map(np.testing.assert_array_equal, numpy_params, before)


def masked_loss(params, batch):
    error = jnp.sum((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2, axis=1)
    return jaxddp.Weighted(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"]))


def test_a_weighted_loss_is_divided_by_all_weights_at_once():
    mask = np.zeros(24, np.float32)
    mask[[0, 1, 2, 3, 4, 11, 23]] = 1  # uneven over ranks and micro-batches, none at all in some
    batch = regression_batch() | {"mask": mask}
    counted = {name: value[mask > 0] for name, value in batch.items()}

    def mean_loss(params):
        total, weight = masked_loss(params, counted)
        return total / weight

    params = linear_params()
    loss, grads = jax.value_and_grad(mean_loss)(params)
    trainer = make(masked_loss, num_microbatches=3)
    state, metrics = trainer.step(trainer.init(params), batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert_trees_close(trainer.params(state), jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), atol=1e-6)
    np.testing.assert_allclose(trainer.evaluate(trainer.init(params), batch), loss, rtol=1e-6)


def test_a_batch_of_no_weight_has_loss_zero_and_updates_nothing():
    batch = regression_batch() | {"mask": np.zeros(24, np.float32)}
    trainer = make(masked_loss, optimizer=optax.adamw(0.1, weight_decay=0.5))
    state, _ = trainer.step(trainer.init(linear_params()), regression_batch() | {"mask": np.ones(24, np.float32)})
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    state, metrics = trainer.step(state, batch)
    assert float(metrics["loss"]) == 0
    assert float(metrics["grad_norm"]) == 0
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)


def test_aux_is_averaged_as_the_loss_is():
    def loss_fn(params, batch):
        error = (batch["x"] @ params["w"] - batch["y"]) ** 2
        large = error > 1
        aux = {
            "per_output": jaxddp.Mean(error),
            "share": large.mean(),
            "mean_large": jaxddp.Weighted((error * large).sum(), large.sum()),
        }
        return error.mean(), aux

    params, batch = {"w": linear_params()["w"]}, regression_batch()
    trainer = make(loss_fn, has_aux=True, num_microbatches=2)
    _, metrics = trainer.step(trainer.init(params), batch)
    loss, aux = loss_fn(params, batch)
    aux["mean_large"] = aux["mean_large"].total / aux["mean_large"].weight
    aux["per_output"] = aux["per_output"].values.mean(0)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    jax.tree.map(lambda ours, full: np.testing.assert_allclose(ours, full, rtol=1e-5), metrics["aux"], aux)


def test_keys_differ_by_rank_step_and_microbatch_and_repeat_with_the_seed():
    def loss_fn(params, batch, key):
        draw = jax.random.uniform(key)
        return jnp.sum(params["w"]) * 0 + draw, jaxddp.PerExample(jnp.full(3, draw))

    batch = {"x": np.zeros(24)}  # 4 ranks x 2 micro-batches of 3 examples

    def draws(seed):
        trainer = make(loss_fn, has_aux=True, num_microbatches=2)
        state = trainer.init({"w": jnp.ones(3)}, seed=seed)
        found = []
        for _ in range(3):
            state, metrics = trainer.step(state, batch)
            found.append(np.asarray(metrics["aux"])[::3])
        return np.stack(found)

    first = draws(0)
    assert len(np.unique(first)) == 3 * 8
    np.testing.assert_array_equal(first, draws(0))
    assert not np.isin(draws(1), first).any()


def test_what_is_not_trainable_gets_no_gradient_no_state_and_no_communication():
    trainer = make(optimizer=optax.adamw(0.1, weight_decay=0.5), trainable=lambda name: name != "b")
    params = linear_params() | {"b": jnp.ones(5)}
    state = trainer.init(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state.opt_state)] == [(), (10, 5), (10, 5)]
    assert trainer.plan(state, regression_batch()).names == ("w",)
    state, _ = trainer.step(state, regression_batch())
    np.testing.assert_array_equal(state.params["b"], np.ones(5))
    assert not np.array_equal(state.params["w"], params["w"])


def test_an_integer_leaf_may_be_carried_frozen():
    params = linear_params() | {"table": jnp.arange(3)}
    trainer = make(trainable=lambda name: name != "table")
    state, _ = trainer.step(trainer.init(params), regression_batch())
    assert state.params["table"].dtype == jnp.int32


def test_grad_dtype_is_what_travels():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), linear_params())
    own, wide = make(), make(grad_dtype=jnp.float32)
    batch = regression_batch()
    assert own.plan(own.init(params), batch).num_bytes == 2 * 55
    state = wide.init(params)
    assert (
        wide.planned(state, batch)
        == jaxddp.gradient_collectives(wide.compile(state, batch))
        == [("all-reduce", 4 * 55)]
    )
    state, _ = wide.step(state, batch)
    assert state.params["w"].dtype == jnp.bfloat16


def test_a_flax_state_can_be_the_tree_of_parameters():
    from flax import nnx

    graph, params = nnx.split(nnx.Linear(10, 5, rngs=nnx.Rngs(0)))

    def loss_fn(params, batch):
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    trainer = make(loss_fn)
    state = trainer.init(params)
    assert set(trainer.plan(state, regression_batch()).names) == {"bias", "kernel"}
    state, _ = trainer.step(state, regression_batch())
    assert jax.tree.structure(trainer.params(state)) == jax.tree.structure(params)


def test_metrics_are_summed_wide_enough():
    def loss_fn(params, batch):
        total = jnp.sum(params["w"]).astype(jnp.float16) * 0 + jnp.float16(20000)
        return jaxddp.Weighted(total, jnp.float16(6)), {"count": jaxddp.Weighted(257, 1)}

    trainer = make(loss_fn, has_aux=True)
    _, metrics = trainer.step(trainer.init({"w": jnp.ones(3)}), regression_batch())
    np.testing.assert_allclose(metrics["loss"], 20000 / 6, rtol=1e-6)
    assert metrics["aux"]["count"] == 257


def test_a_rank_where_nothing_counts_does_not_spoil_aux():
    def loss_fn(params, batch):
        hits, count = jnp.sum(batch["mask"]), jnp.sum(batch["mask"])
        return masked_loss(params, batch), hits / count  # 0 / 0 where the mask is empty

    batch = regression_batch() | {"mask": np.repeat([1, 0], 12).astype(np.float32)}
    trainer = make(loss_fn, has_aux=True)
    _, metrics = trainer.step(trainer.init(linear_params()), batch)
    assert metrics["aux"] == 1


def test_the_key_may_be_a_keyword():
    def loss_fn(params, batch, *, key):
        return jnp.sum(params["w"]) * 0 + jax.random.uniform(key)

    def positional(params, batch, key):
        return loss_fn(params, batch, key=key)

    losses = []
    for function in (loss_fn, positional):
        trainer = make(function)
        losses.append(trainer.step(trainer.init(linear_params()), regression_batch())[1]["loss"])
    assert 0 < losses[0] == losses[1]


def test_an_optimizer_may_look_at_the_loss():
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    trainer = make(optimizer=optimizer)
    state = trainer.init(linear_params())
    state, metrics = trainer.step(state, regression_batch())
    assert float(state.opt_state[1].best_value) == float(metrics["loss"])


def test_params_are_a_copy_that_later_steps_leave_alone():
    trainer = make()
    state = trainer.init(linear_params())
    params = trainer.params(state)
    trainer.step(state, regression_batch())
    assert_trees_close(params, linear_params(), atol=0)


# Bad input


def test_a_donated_state_is_refused():
    trainer = make()
    state = trainer.init(linear_params())
    trainer.step(state, regression_batch())
    for use in (trainer.step, trainer.evaluate):
        with pytest.raises(ValueError, match=r"state \(='step'\) was donated to an earlier step"):
            use(state, regression_batch())
    with pytest.raises(ValueError, match="was donated to an earlier step"):
        trainer.params(state)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (regression_batch(10), r"batch \(=10 examples\) must be divisible by num_ranks x num_microbatches \(=4 x 1\)$"),
        (
            {"x": np.ones((8, 10)), "y": np.ones((4, 5))},
            r"batch leaves must agree in length, they have \{'x': 8, 'y': 4\}$",
        ),
        ({"x": np.ones((0, 10)), "y": np.ones((0, 5))}, r"batch \(=0 examples\) must be divisible"),
        ({"x": np.float32(1)}, r"batch leaf 'x' \(=.*\) must be an array whose dimension 0 counts examples$"),
        ({}, r"batch \(=\{\}\) must hold at least one array$"),
    ],
)
def test_batches_that_cannot_be_split(batch, message):
    trainer = make()
    with pytest.raises(ValueError, match=message):
        trainer.step(trainer.init(linear_params()), batch)
    with pytest.raises(ValueError, match=message):
        trainer.compile(trainer.init(linear_params()), batch)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, r"params \(=\{\}\) must hold at least one array$"),
        ({"w": "text"}, r"params leaf 'w' \(='text'\) must be an array$"),
        ({"w": np.arange(3)}, r"parameter 'w' has dtype int64: what is trained must be of a floating dtype"),
    ],
)
def test_params_that_cannot_be_trained(params, message):
    with pytest.raises(ValueError, match=message):
        make().init(params)


@pytest.mark.parametrize(
    ("result", "has_aux", "message"),
    [
        (jnp.ones(4), False, r"loss_fn \(=loss_fn\) returned \(4,\): the loss must be a scalar or jaxddp.Weighted"),
        ((jnp.ones(()), {}), False, r"loss_fn \(=loss_fn\) returned tuple: the loss must be a scalar"),
        (jaxddp.Weighted(jnp.ones(2), jnp.ones(())), False, r"returned \(2,\)"),
        (jnp.ones((), jnp.int32), False, r"returned dtype int32: the loss must be floating"),
        (jnp.ones(()), True, r"loss_fn \(=loss_fn\) must return \(loss, aux\) when has_aux is set"),
    ],
)
def test_losses_that_are_none(result, has_aux, message):
    def loss_fn(params, batch):
        return result

    trainer = make(loss_fn, has_aux=has_aux)
    with pytest.raises(ValueError, match=message):
        trainer.step(trainer.init(linear_params()), regression_batch())


def test_other_bad_input():
    with pytest.raises(ValueError, match=r"num_microbatches \(=0\) must be a positive integer"):
        make(num_microbatches=0)
    with pytest.raises(ValueError, match=r"max_grad_norm \(=-1\) must be positive or None"):
        make(max_grad_norm=-1)
    with pytest.raises(ValueError, match="trainable must select at least one of the 2 parameters"):
        make(trainable=lambda name: False).init(linear_params())
    with pytest.raises(ValueError, match=r"grad_dtype \(=.*int32.*\) must be a floating dtype or None"):
        make(grad_dtype=jnp.int32)
    two_axes = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"mesh axes \(=\('data', 'model'\)\) must be one"):
        jaxddp.Trainer(linear_loss, optax.sgd(0.1), jaxddp.naive(), two_axes)
    with pytest.raises(
        ValueError, match=r"num_ranks \(=9\) must be at most the number of devices \(=8 cpu\).*simulate_devices\(9\)"
    ):
        jaxddp.data_mesh(9)
    with pytest.raises(ValueError, match=r"num_devices \(=9\) cannot be simulated: JAX has already started with 8 cpu"):
        jaxddp.simulate_devices(9)


@pytest.mark.parametrize("strategy", [jaxddp.bucketed(), jaxddp.zero1(), jaxddp.zero3(min_shard_elements=10)])
def test_momentum_and_norms_below_the_limit_are_those_of_one_device(strategy):
    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)  # w is cut by zero3, b is not

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 4)), "b": rng.normal(size=4)}
    batch = {"x": rng.normal(size=(8, 8)), "y": rng.normal(size=(8, 4))}
    optimizer = optax.sgd(0.1, momentum=0.9)
    with jax.enable_x64(True):
        trainer = jaxddp.Trainer(loss, optimizer, strategy, jaxddp.data_mesh(4), max_grad_norm=1e6)
        state, wanted, opt_state = trainer.init(params), params, optimizer.init(params)
        grad_fn = jax.jit(jax.grad(loss))
        for _ in range(3):
            grads = grad_fn(wanted, batch)
            updates, opt_state = optimizer.update(grads, opt_state)
            wanted = optax.apply_updates(wanted, updates)
            state, metrics = trainer.step(state, batch)
            assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-12)
        for name, found in trainer.params(state).items():
            np.testing.assert_allclose(found, wanted[name], rtol=0, atol=1e-12)  # float64: only the order of sums
