"""Training steps of one's own, each with a fault that trains in silence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxddp.comparison_test import drawn
from jaxddp.parity import StepParityError, check_step

OPTIMIZER = optax.adam(1e-2)


def mapped(step, *, check_vma=False):
    return lambda mesh: jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    )


def updated(state, grads):
    updates, opt_state = OPTIMIZER.update(grads, state["opt"], state["params"])
    return state | {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2)


def step_with(reduce, loss_fn=loss_fn):
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return updated(state, reduce(grads)), {"loss": jax.lax.pmean(loss, "data")}

    return step


def mean(grads):
    return jax.lax.pmean(grads, "data")


@pytest.fixture
def batch():
    images = np.random.default_rng(2).integers(0, 256, (16, 3), np.uint8)
    return drawn(x=(16, 3), y=(16, 2)) | {"mask": np.arange(16) < 9, "image": images, "weight": np.arange(1, 17) / 7}


@pytest.fixture
def state():
    params = {"w": np.random.default_rng(1).normal(size=(3, 2)), "b": np.zeros(2)}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def causes(make_step, state, batch, **options):
    with pytest.raises(StepParityError) as found:
        check_step(make_step, state, batch, **options)
    return {one.name: one.cause for one in found.value.parted}


def test_right_steps_pass(state, batch):
    check_step(mapped(step_with(mean)), state, batch)

    def without_mesh(state, batch):
        return updated(state, jax.grad(loss_fn)(state["params"], batch))

    check_step(lambda mesh: jax.jit(without_mesh, donate_argnums=0), state, batch, num_ranks=2)

    def by_pmap(mesh):
        step = jax.pmap(step_with(mean), "data", devices=list(mesh.devices.flat))

        def of_all(state, batch):  # stacks the state, and splits the batch
            state = jax.tree.map(lambda leaf: jnp.stack([leaf] * mesh.size), state)
            split = jax.tree.map(lambda leaf: leaf.reshape(mesh.size, -1, *leaf.shape[1:]), batch)
            return jax.tree.map(lambda leaf: leaf[0], step(state, split))

        return of_all

    check_step(by_pmap, state, batch)


def masked_loss(params, batch):
    error = jnp.sum((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2, -1)
    return jnp.sum(error * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def weighted_loss(params, batch):
    return masked_loss(params, batch | {"mask": batch["weight"]})


def normalised_loss(params, batch):
    """Of images in integers, each by what a rank has of them."""
    hidden = batch["image"] / 255.0 @ params["w"]
    return jnp.mean((jnp.tanh(hidden - hidden.mean(0)) - batch["y"]) ** 2) + jnp.sum(params["b"] ** 2)


def divided_twice(grads):
    return jax.tree.map(lambda one: mean(one) / jax.lax.axis_size("data"), grads)


def scaled_by_rank(grads):
    return mean(jax.tree.map(lambda one: one * (1 + jax.lax.axis_index("data")), grads))


FOUR_TIMES = {"opt.0.mu.w": "4 times as large", "opt.0.nu.w": "squares"}


@pytest.mark.parametrize(
    ("step", "named", "right"),
    [
        (mapped(step_with(lambda grads: jax.lax.psum(grads, "data"))), FOUR_TIMES, "1.loss"),
        # Under check_vma autodiff has summed gradients of equal parameters, and the mean of equal ones is the sum.
        (mapped(step_with(mean), check_vma=True), FOUR_TIMES, "1.loss"),
        (mapped(step_with(divided_twice)), {"opt.0.mu.w": "1/4 as large"}, "1.loss"),
        (mapped(step_with(lambda grads: grads | {"w": mean(grads["w"])})), {"params.b": "copies"}, "0.params.w"),
        (mapped(step_with(mean, masked_loss)), {"params.w": "'mask' differ: sum both, divide once"}, "0.opt.0.count"),
        (mapped(step_with(mean, weighted_loss)), {"opt.0.mu.w": "'weight' differ: sum both, divide once; or"}, ""),
        (mapped(step_with(mean, normalised_loss)), {"opt.0.mu.w": "; or statistics of a rank's own"}, "0.opt.0.count"),
        (mapped(step_with(scaled_by_rank)), {"opt.0.mu.w": "depends on the rank"}, "1.loss"),
    ],
    ids=[
        "sums", "sums of autodiff", "divided twice", "not reduced", "mean of means", "mean of weighted means",
        "normalised integers", "scaled by rank",
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_cause(state, batch, step, named, right):
    found = causes(step, state, batch)
    assert right not in found and all(cause in found[f"0.{leaf}"] for leaf, cause in named.items())
    assert "params.w" not in named or found["1.loss"] == found["0.params.w"]


def test_what_a_step_returns_may_be_in_any_order_and_of_any_kind(state, batch):
    def make_step(mesh):
        step = mapped(step_with(lambda grads: jax.lax.psum(grads, "data")))(mesh)

        def reversed_step(state, batch):
            state, metrics = step(state, batch)
            return float(metrics["loss"]), np.asarray(state["params"]["w"]), state

        return reversed_step

    found = causes(make_step, state, batch)
    assert "4 times as large" in found["2.opt.0.mu.w"] and "0" not in found


def test_gradients_beside_the_next_parameters_are_no_state(batch):
    def step(params, batch):
        grads = jax.tree.map(lambda one: jax.lax.psum(one, "data"), jax.grad(loss_fn)(params, batch))
        return jax.tree.map(lambda one, grad: one - 0.1 * grad, params, grads), grads

    found = causes(mapped(step), {"w": np.ones((3, 2)), "b": np.zeros(2)}, batch)
    assert found.keys() == {"0.w", "0.b", "1.w", "1.b"} and all("4 times as large" in one for one in found.values())


def test_keys_that_ranks_hold_otherwise_are_named_and_those_given_are_kept(state, batch):
    def step_folding(fold, state, batch):
        key = jax.random.fold_in(state["key"], jax.lax.axis_index("data") if fold else 1)
        return updated(state, mean(jax.grad(loss_fn)(state["params"], batch))) | {"key": key}

    state = state | {"key": jax.random.key(0)}
    check_step(lambda mesh: jax.jit(mapped(partial(step_folding, False))(mesh), donate_argnums=0), state, batch)
    assert not state["key"].is_deleted()
    assert causes(mapped(partial(step_folding, True)), state, batch).keys() == {"key"}


def test_a_truth_value_that_differs_is_named(state, batch):
    def step(state, batch):
        moved = updated(state, mean(jax.grad(loss_fn)(state["params"], batch)))
        return moved | {name: state[name] | (jax.lax.axis_size("data") > 1) for name in ("is_done", "bits")}

    state = state | {"is_done": np.zeros(2, bool), "bits": np.zeros(2, np.uint32)}  # no key
    assert causes(mapped(step), state, batch).keys() == {"is_done", "bits"}


def normalized_step(is_global, is_synced):
    def step(state, batch):
        def loss(params):
            seen = jnp.mean(batch["x"], 0)
            seen = mean(seen) if is_global else seen
            return loss_fn(params, batch | {"x": batch["x"] - seen}), 0.9 * state["seen"] + 0.1 * seen

        grads, seen = jax.grad(loss, has_aux=True)(state["params"])
        return updated(state, mean(grads)) | {"seen": mean(seen) if is_synced else seen}

    return mapped(step)


def test_what_is_not_finite_on_one_device_is_told(state, batch):
    def step(state, batch):
        return updated(state, mean(jax.grad(loss_fn)(state["params"], batch))) | {"log": jnp.log(-state["params"]["b"])}

    assert causes(mapped(step), state | {"params": state["params"] | {"b": np.ones(2)}}, batch) == {
        "log": "it is not finite on one device either"
    }


def test_statistics_of_a_ranks_own_examples(state, batch):
    state = state | {"seen": np.zeros(3)}
    check_step(normalized_step(is_global=True, is_synced=True), state, batch)
    assert "BatchNorm" in causes(normalized_step(is_global=False, is_synced=True), state, batch)["opt.0.mu.w"]
    assert "copies" in causes(normalized_step(is_global=False, is_synced=False), state, batch)["seen"]


def dropped_out(state, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return jax.grad(loss_fn)(state["params"], batch | {"x": batch["x"] * keep})


def dropout_step(fold):
    def step(state, batch):
        key = jax.random.fold_in(state["key"], jax.lax.axis_index("data")) if fold else state["key"]
        return updated(state, mean(dropped_out(state, batch, key)))

    return mapped(step)


def test_equal_dropout_masks_on_all_ranks(state, batch):
    state = state | {"key": jax.random.key(0)}
    assert "same noise" in causes(dropout_step(fold=False), state, batch)[""]
    assert "number of devices" in causes(dropout_step(fold=True), state, batch)["params.w"]


def test_noise_that_ranks_are_meant_to_share(state, batch):
    def step(state, batch):
        grads = mean(jax.grad(loss_fn)(state["params"], batch))
        drawn, key = jax.random.split(state["key"])
        noise = jax.random.normal(drawn, grads["w"].shape)
        return updated(state, grads | {"w": grads["w"] + 0.1 * noise}) | {"key": key}

    check_step(mapped(step), state | {"key": jax.random.PRNGKey(0)}, batch)


def test_noise_of_one_program_over_all_devices_is_the_same(state, batch):
    def step(state, batch):
        return updated(state, dropped_out(state, batch, state["key"]))

    check_step(lambda mesh: jax.jit(step), state | {"key": jax.random.key(0)}, batch)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_ranks": 1}, "num_ranks"), ({"num_ranks": 3}, "batch"), ({"num_ranks": 10**6}, "num_ranks"),
        ({"make_step": lambda mesh: lambda state, batch: None}, "step must return what"),
        ({"make_step": lambda mesh: lambda state, batch: (state, {})}, "step must return what"),
        ({"make_step": lambda mesh: lambda state, batch: (state, jnp.ones(2))}, "is its learning rate 0"),
        ({"make_step": mapped(lambda state, batch: (*state.values(), batch["x"].mean()))}, "is its learning rate 0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(state, batch, options, name):
    with pytest.raises(ValueError, match=name):
        check_step(**{"make_step": mapped(step_with(mean)), "state": state, "batch": batch} | options)
