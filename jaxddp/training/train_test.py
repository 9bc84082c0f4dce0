import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.comparison_test import assert_near, drawn, on_one_device, refusal
from jaxddp.models.toy_test import build
from jaxddp.training.step import auto_step


def regression_batch(length=24, seed=0):
    return drawn(seed, np.float32, x=(length, 10), y=(length, 5))


def linear_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def linear_params():
    return {"w": jnp.asarray(np.random.default_rng(1).normal(size=(10, 5)), jnp.float32), "b": jnp.zeros(5)}


def make(loss_fn=linear_loss, strategy=None, num_ranks=4, optimizer=None, **options):
    return jaxddp.Trainer(
        loss_fn, optimizer or optax.sgd(0.1), strategy or jaxddp.bucketed(25), jaxddp.data_mesh(num_ranks), **options
    )


def test_one_compile_for_each_shape_of_batch_and_none_from_step_to_step():
    trainer = make(optimizer=optax.adamw(1e-2))
    state = trainer.init(linear_params())
    shapes = jax.eval_shape(lambda: (state, jax.tree.map(jnp.asarray, regression_batch(8))))
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
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), regression_batch(8))
        assert trainer.compile(*shapes) is trainer.compile(state, regression_batch(8)) is trainer.compile(state, wide)
        state, _ = trainer.step(state, regression_batch(24))
        assert len(compiles) == 2
        state, _ = trainer.step(state, wide)
        with jax.enable_x64(True):
            trainer.step(state, wide)  # float64 now: another program
        assert len(compiles) == 3
    finally:
        jax.monitoring.clear_event_listeners()


def calls_passed(call, *args):
    """The code of every function of Python that a call goes through."""
    codes = []
    sys.setprofile(lambda frame, event, arg: codes.append(frame.f_code) if event == "call" else None)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
    return codes


def test_a_step_after_the_first_does_little_in_python():
    """A GPU whose steps are waited for waits for this too."""
    counts = []
    for num_leaves in (2, 20):
        trainer = make(lambda params, batch: sum(map(jnp.sum, params)) * jnp.mean(batch["x"]))
        batch = jax.device_put({"x": jnp.ones((4, 2))}, trainer.batch_sharding)
        state, _ = trainer.step(trainer.init([jnp.ones(3)] * num_leaves), batch)
        counts.append(len(calls_passed(trainer.step, state, batch)))
    assert counts[0] == counts[1] < 200  # no walk over the leaves; placing the batch again would be as many


@pytest.mark.parametrize("name, num_functions, num_files", [("bucketed", 75, 13), ("zero1", 90, 14), ("zero3", 80, 12)])
def test_who_follows_the_first_step_passes_few_functions(name, num_functions, num_files):
    mark = jaxddp.layer if name == "zero3" else lambda layer: layer
    dense = mark(lambda params, x: jnp.tanh(x @ params["w"] + params["b"]))
    trainer = make(lambda params, batch: jnp.mean(dense(params, batch["x"]) ** 2), jaxddp.make_strategy(name))
    state, batch = trainer.init({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}), {"x": np.ones((4, 3), np.float32)}
    package = str(Path(jaxddp.__file__).parent)
    codes = calls_passed(trainer.step, state, batch)
    ours = [one for one in codes if one.co_filename.startswith(package) and "_test.py" not in one.co_filename]
    passed = {(one.co_filename, one.co_qualname) for one in ours if one.co_name[0] != "<"}  # no lambdas, comprehensions
    assert 50 < len(passed) <= num_functions and len({file for file, _ in passed}) <= num_files, sorted(passed)


def test_the_programs_size_does_not_grow_with_the_number_of_microbatches():
    sizes = []
    for num_microbatches in (3, 12):
        trainer = make(num_microbatches=num_microbatches, num_ranks=2)
        state, batch = trainer.init(linear_params()), regression_batch(8 * num_microbatches)
        compiled = trainer.compile(state, batch)
        assert len(jaxddp.gradient_collectives(compiled)) == 1
        sizes.append(len(compiled.as_text().splitlines()))
    assert sizes[0] == sizes[1]


def params_of(width):
    return drawn(width, "f", up=(8, width), down=(width, 1))


def of_two_layers():
    def loss_fn(params, batch):
        return jnp.mean(jnp.square(batch @ params["up"] @ params["down"]))

    return make(loss_fn, jaxddp.zero3(min_shard_elements=0), 3, optax.adam(0.1))


def test_a_trainer_tells_states_of_several_models_apart_by_their_shards():
    batch = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    trainer, alone = of_two_layers(), {width: of_two_layers() for width in (5, 9)}
    states = {width: trainer.init(params_of(width)) for width in alone}
    expected = {width: one.init(params_of(width)) for width, one in alone.items()}
    trainer.abstract_state(params_of(20))
    for _ in range(2):
        for width in alone:
            assert trainer.planned(states[width], batch) == alone[width].planned(expected[width], batch)
            states[width], _ = trainer.step(states[width], batch)
            expected[width], _ = alone[width].step(expected[width], batch)
            assert_near(trainer.params(states[width]), alone[width].params(expected[width]), atol=0)
    transposed = jax.tree.map(jnp.transpose, params_of(5))
    for describe in (trainer.abstract_state, trainer.init):  # whose shards might be the other's
        found = refusal(describe, transposed)
        assert "cannot be told by their shards from another model's" in found
    trainer.step(states[5], batch)
    of_two_layers().abstract_state(transposed)


def test_a_callers_arrays_stay_valid():
    trainer = make()
    for params in (linear_params(), jax.tree.map(np.array, linear_params())):
        with jax.transfer_guard("disallow"):  # explicit copies pass it
            state = trainer.init(params)
            found = trainer.params(state)
            trainer.step(state, regression_batch())
        assert_near(params, linear_params(), atol=0)
        assert_near(found, linear_params(), atol=0)


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
    assert_near(trainer.params(state), jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), atol=1e-6)
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


def test_a_donated_state_is_refused():
    trainer = make()
    state = trainer.init(linear_params())
    trainer.step(state, regression_batch())
    for use in (trainer.step, trainer.evaluate):
        assert "state (='step') was donated to an earlier step" in refusal(use, state, regression_batch())
    assert "was donated to an earlier step" in refusal(trainer.params, state)


def test_batches_that_cannot_be_split():
    trainer = make()
    state = trainer.init(linear_params())
    for batch, message in (
        (regression_batch(10), "batch (=10 examples) must be divisible by num_ranks x num_microbatches (=4 x 1)"),
        ({"x": np.ones((8, 10)), "y": np.ones((4, 5))}, "batch (={'x': 8, 'y': 4}) must be arrays"),
        ({"x": np.ones((0, 10)), "y": np.ones((0, 5))}, "batch (=0 examples) must be divisible"),
        ({"x": np.float32(1)}, "must be arrays whose dimension 0 counts examples"),
        ({}, "batch (={}) must be arrays"),
    ):
        for use in (trainer.step, trainer.compile):
            assert message in refusal(use, state, batch)
    assert "'x.0.7': 'float'}) must be" in refusal(trainer.step, state, {"x": np.ones((8, 10)).tolist()})


def test_losses_that_are_none():
    for result, has_aux, message in (
        (jnp.ones(4), False, "loss_fn (=loss_fn) returned (4,)"),
        ((jnp.ones(()), {}), False, "loss_fn (=loss_fn) returned tuple"),
        (jnp.ones(()), True, "loss_fn (=loss_fn) must return (loss, aux)"),
    ):
        trainer = make(lambda params, batch, result=result: result, has_aux=has_aux)
        trainer.loss_fn.__name__ = "loss_fn"
        assert message in refusal(trainer.step, trainer.init(linear_params()), regression_batch())


def test_other_bad_input():
    assert "params (={}) must hold at least one array" in refusal(make().init, {})
    assert "params leaf 'w' (='text') must be an array" in refusal(make().init, {"w": "text"})
    assert "parameter 'w' has dtype int64" in refusal(make().init, {"w": np.arange(3)})
    assert "max_grad_norm (=-1)" in refusal(make, max_grad_norm=-1)
    assert "num_microbatches (=0)" in refusal(make, num_microbatches=0)
    assert "grad_dtype" in refusal(make, grad_dtype=jnp.int32)
    assert "compute_dtype" in refusal(make, compute_dtype=jnp.float8_e5m2)
    assert "trainable must select at least one" in refusal(make(trainable=lambda name: False).init, linear_params())
    assert "nonfinite (='stop')" in refusal(make, nonfinite="stop")
    found = refusal(jaxddp.data_mesh, 9)
    assert "num_ranks (=9)" in found and "simulate_devices(9)" in found
    with pytest.raises(RuntimeError, match="before backends are initialized"):
        jaxddp.simulate_devices(9)


@pytest.mark.parametrize("strategy", [jaxddp.bucketed(), jaxddp.zero1(), jaxddp.zero3(min_shard_elements=10)])
def test_momentum_and_norms_below_the_limit_are_those_of_one_device(x64, strategy):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 4)), "b": rng.normal(size=4)}  # w is cut by zero3, b is not
    batch = {"x": rng.normal(size=(8, 8)), "y": rng.normal(size=(8, 4))}
    plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5, rtol=1.0)  # at every step
    optimizer = optax.chain(optax.sgd(0.1, momentum=0.9), plateau)
    trainer = make(strategy=strategy, optimizer=optimizer, max_grad_norm=1e6)
    state = trainer.init(params)
    norm_of = jax.jit(lambda params: optax.tree.norm(jax.grad(linear_loss)(params, batch)))
    for _ in range(3):
        before = trainer.params(state)
        state, metrics = trainer.step(state, batch)
        np.testing.assert_allclose(metrics["grad_norm"], norm_of(before), rtol=1e-12)
    assert_near(trainer.params(state), on_one_device(linear_loss, params, [batch] * 3, optimizer))


def test_jits_own_step_trains_as_the_strategies_do_with_collectives_of_the_compilers_choice():
    loss_fn, params = build("toy")
    trainer, batch = make(loss_fn, jaxddp.flat()), regression_batch(8)
    ours, theirs = trainer.init(params), trainer.init(params)
    replicated, by_rank = (jax.NamedSharding(trainer.mesh, jax.P(*axes)) for axes in ((), ("data",)))
    jitted = jax.jit(auto_step(loss_fn, optax.sgd(0.1)), in_shardings=(replicated, by_rank), out_shardings=replicated)
    compiled = jitted.lower(theirs, batch).compile()
    found = jaxddp.gradient_collectives(compiled)
    assert len(found) < len(jax.tree.leaves(params))  # merged, where no strategy says otherwise
    assert sum(num_bytes for _, num_bytes in found) >= sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    batch = jax.device_put(batch, by_rank)
    for index in range(3):
        ours, our_metrics = trainer.step(ours, batch)
        theirs, their_metrics = jax.block_until_ready(compiled(theirs, batch))
        assert int(theirs.step) == index + 1
        # Sums of float32 in another order: 2^-24 per addition, of which at most a few hundred do not average out.
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5), their_metrics, our_metrics)
    assert_near(ours.params, theirs.params, atol=2e-6)  # likewise; the largest parameters are about 1
