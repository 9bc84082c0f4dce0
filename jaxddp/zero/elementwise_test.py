import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from optax import contrib

from jaxddp.communication.sharding import cut
from jaxddp.comparison_test import mostly_full, refusal
from jaxddp.layout import Leaf, cut_leaves, whole
from jaxddp.tree import named_leaves, path_name
from jaxddp.zero.elementwise import describe_update, shard_state

pytestmark = pytest.mark.usefixtures("optimized")

SHAPES = {"layers": [{"kernel": (3, 4), "bias": (2,)}, {"kernel": (3, 4), "bias": (2,)}], "scale": (), "frozen": None}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)


def params_of(make):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda shape: make(rng, shape), SHAPES, is_leaf=lambda shape: isinstance(shape, tuple))


PARAMS = params_of(lambda rng, shape: jax.ShapeDtypeStruct(shape, jnp.float32))


def cut_in_two(params):
    return cut_leaves(whole(params), 2)


def check(optimizer, leaves=None):
    return shard_state(optimizer, cut_in_two(PARAMS) if leaves is None else leaves)


def no_biases(params):
    return jax.tree.map_with_path(lambda path, leaf: not path_name(path).endswith("bias"), params)


def of_gradients(change, init=lambda params: optax.EmptyState()):
    return optax.GradientTransformation(init, lambda grads, state, params=None: (change(grads), state))


def of_each_gradient(change):
    return of_gradients(lambda grads: jax.tree.map(change, grads))


def with_state(start, change):
    return optax.GradientTransformation(start, lambda grads, state, params=None: (grads, change(grads, state)))


def one_random_number(key):
    def update(key, grads):
        key, now = jax.random.split(key)
        return jax.tree.map(lambda grad: grad * jax.random.normal(now), grads), key

    return optax.GradientTransformation(lambda params: key, lambda grads, key, params=None: update(key, grads))


@jax.custom_vjp
def clipped_tanh(x):
    return jnp.where(jnp.abs(x) < 1, jnp.tanh(x), jnp.sign(x))


clipped_tanh.defvjp(lambda x: (clipped_tanh(x), x), lambda x, grad: (grad,))

MULTI_STEPS = optax.MultiSteps(optax.sign_sgd(SCHEDULE), 2)  # compiled below, for its branches are each time otherwise
ELEMENTWISE = {
    "nesterov": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1, mask=no_biases),
    "adamw, mask by ndim": optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    "adamw, nesterov": optax.adamw(0.1, nesterov=True, mu_dtype=jnp.bfloat16),
    "adagrad": optax.adagrad(0.1),
    "rmsprop, centered": optax.rmsprop(0.1, centered=True, momentum=0.9, bias_correction=True),
    "radam": optax.radam(0.1),
    "adan": optax.adan(0.1, weight_decay=0.1),
    "rprop": optax.rprop(0.1),
    "multi_transform": optax.multi_transform(
        {True: optax.adam(0.1), False: optax.chain(optax.trace(0.9), optax.scale(-0.1))}, no_biases
    ),
    "frozen by labels": optax.multi_transform({True: optax.adam(0.1), False: optax.set_to_zero()}, no_biases),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(SCHEDULE, b1=0.8),
    "chain": optax.chain(optax.clip(0.5), optax.add_decayed_weights(0.1, no_biases), optax.scale_by_adam()),
    "ema": optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "MultiSteps": optax.GradientTransformation(MULTI_STEPS.init, jax.jit(MULTI_STEPS.update)),
    "masked": optax.masked(optax.trace(0.9), no_biases),
    "set_to_zero": optax.set_to_zero(),
    "apply_every": optax.chain(optax.scale(-0.1), optax.apply_every(2)),
    "scale_by_schedule": optax.scale_by_schedule(optax.piecewise_interpolate_schedule("linear", 0.1, {2: 0.5, 3: 0.1})),
    "reduce_on_plateau": optax.chain(optax.adam(0.1), contrib.reduce_on_plateau(patience=1, rtol=1.0)),
    "keep_params_nonnegative": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "factored_rms of small matrices": optax.scale_by_factored_rms(),
    "schedule_free": contrib.schedule_free_adamw(0.1),
    "madgrad": contrib.madgrad(0.1),
    "one random number for all": one_random_number(jax.random.key(0)),
    "wrapped programs": of_each_gradient(lambda grad: jax.checkpoint(clipped_tanh)(jax.nn.relu(grad))),
    "values passed on": of_each_gradient(
        lambda grad: jax.lax.optimization_barrier(jax.lax.stop_gradient(checkpoint_name(grad, "gradient")))
    ),
    "a rate out of a table": of_each_gradient(
        lambda grad: grad * jax.lax.dynamic_slice(jnp.array([0.1, 0.2]), (1,), (1,)).reshape((1,) * grad.ndim)
    ),
    "a choice by count": of_each_gradient(lambda grad: jax.lax.switch(2 - 1, [jnp.zeros_like, jnp.negative], grad)),
    "another of the same shape": of_gradients(
        lambda grads: grads | {"layers": [grads["layers"][1], jax.tree.map(jnp.add, *grads["layers"])]}
    ),
    "a norm that nobody reads": of_gradients(lambda grads: (optax.tree.norm(grads), grads)[1]),
    "a history of numbers": with_state(
        lambda params: {"history": jnp.zeros(3)}, lambda grads, state: {"history": jnp.roll(state["history"] + 1, 1)}
    ),
    "a reshape in order": of_each_gradient(lambda grad: jax.lax.reshape(grad, grad.shape, tuple(range(grad.ndim)))),
    "constants without a place": of_each_gradient(lambda grad: grad * jnp.full(grad.shape, 2.0).reshape(grad.shape)),
}


def on_ranks(leaves, tree):
    return [jax.tree.map(lambda leaf, x, rank=rank: leaf.cut.local_shard(x, rank), leaves, tree) for rank in range(2)]


# Of the others it is enough by default that they pass: what passes does the same on shards.
QUICK = ("nesterov", "adamw", "MultiSteps", "reduce_on_plateau", "one random number for all", "wrapped programs")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_wise_optimizers_pass(name):
    check(ELEMENTWISE[name])


@pytest.mark.parametrize("name", mostly_full(QUICK, ELEMENTWISE))
def test_element_wise_optimizers_do_on_shards_what_they_do_on_the_whole(name):
    optimizer = ELEMENTWISE[name]
    leaves, laid_out = cut_in_two(PARAMS), check(optimizer)
    update = optax.with_extra_args_support(optimizer).update
    full = params_of(lambda rng, shape: jnp.asarray(rng.normal(size=shape), jnp.float32))
    state, own = optimizer.init(full), on_ranks(leaves, full)
    own_states = [optimizer.init(params) for params in own]
    rng = np.random.default_rng(1)
    for step in range(2):
        grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), full)
        updates, state = update(grads, state, full, value=jnp.float32(step))
        full = optax.apply_updates(full, updates)
        for rank, own_grads in enumerate(on_ranks(leaves, grads)):
            updates, own_states[rank] = update(own_grads, own_states[rank], own[rank], value=jnp.float32(step))
            own[rank] = optax.apply_updates(own[rank], updates)
    held = zip(*(jax.tree.leaves(held) for held in zip(own_states, own, strict=True)), strict=True)
    every = jax.tree.leaves((laid_out, leaves)), jax.tree.leaves((state, full)), held
    for leaf, array, shards in zip(*every, strict=True):
        # Run operation by operation, both round alike: equal to the last bit.
        if leaf.cut is not None:
            rows = np.stack([np.asarray(shard).reshape(-1) for shard in shards])
            np.testing.assert_array_equal(leaf.cut.from_rows(rows), array)
        else:
            assert all(jnp.array_equal(shard, array) for shard in shards)


def by_size(params):
    return jax.tree.map(lambda leaf: leaf.size > 6, params)


BIAS, KERNEL = (f"'update.layers.0.{name}' is another computation" for name in ("bias", "kernel"))
REFUSED = {
    "lamb": (optax.lamb(0.1), f"{BIAS}; .*set max_grad_norm"),
    "adafactor, factored": (optax.adafactor(0.1, min_dim_size_to_factor=2), "incompatible shapes"),
    "muon": (contrib.muon(0.1), KERNEL),
    "clip_by_global_norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), "'state.1.0.mu.layers.0.b"),
    "lbfgs": (optax.scale_by_lbfgs(), "Incompatible types"),
    "dog": (contrib.dog(), "'first.1.max_dist' is another"),
    "prodigy": (contrib.prodigy(), "'state.estim_lr' is another"),
    "noisy_sgd": (optax.noisy_sgd(0.1, key=0), BIAS),
    "apply_if_finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "'state.notfinite_count' is another .*'skip'"),
    "zero_nans": (optax.zero_nans(), "'state.found_nan.layers.0.bias' is another"),
    "flatten": (optax.flatten(optax.adam(0.1)), "incompatible shapes"),
    "0-d scales": (of_gradients(lambda grads: jax.tree.map(lambda grad: grad * grads["scale"], grads)), "'update."),
    "0-d branches": (
        of_gradients(
            lambda grads: jax.lax.cond(grads["scale"] > 0, lambda: grads, lambda: optax.tree.zeros_like(grads))
        ),
        "Pred must be a scalar",
    ),
    "0-d limits": (of_gradients(lambda grads: grads | {"layers": jax.tree.map(
        lambda grad: jax.lax.clamp(grads["scale"], grad, np.float32(1.0)), grads["layers"])}), "clamp|'update."),
    "0-d kept": (
        with_state(lambda params: {"last": jnp.zeros(())}, lambda grads, state: {"last": grads["scale"]}),
        "'state.last' is another",
    ),
    "flip": (of_each_gradient(lambda grad: jnp.flip(grad)), BIAS),
    "a reshape that permutes": (
        of_each_gradient(lambda grad: jax.lax.reshape(grad, grad.shape, tuple(range(grad.ndim))[::-1])), KERNEL,
    ),
    "a loop": (of_each_gradient(lambda grad: jax.lax.fori_loop(0, 3, lambda _, x: x / 2, grad)), BIAS),
    "ramp as mask": (of_each_gradient(lambda grad: grad * (jnp.arange(grad.size).reshape(grad.shape) > 1)), BIAS),
    "mask of constants": (of_each_gradient(lambda grad: grad * np.arange(grad.size).reshape(grad.shape)), BIAS),
    "array as state": (
        optax.GradientTransformation(
            lambda params: jnp.ones(2),
            lambda grads, state, params=None: (jax.tree.map(lambda g: g * state if g.ndim == 1 else g, grads), state),
        ),
        "'update.|incompatible shapes",
    ),
    "sm3": (optax.sm3(0.1), "arity mismatch|structure"),
    "size as a number": (of_each_gradient(lambda grad: grad / grad.size), BIAS),
    "size as a sum": (of_each_gradient(lambda grad: grad * jnp.sum(jnp.ones_like(grad))), BIAS),
    "dims of 0-d": (of_each_gradient(lambda grad: grad if grad.ndim else 2 * grad), "'update.scale' is another"),
    "update of one shape": (of_each_gradient(lambda grad: jnp.ones((3, 4)) if grad.ndim == 2 else grad), KERNEL),
    "shape as constants": (
        of_each_gradient(lambda grad: grad * np.ones((3, 4), np.float32) if grad.ndim == 2 else grad),
        "mul got incompatible shapes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_would_do_another_thing_on_shards_are_refused_in_one_line(name):
    optimizer, reason = REFUSED[name]
    for num_ranks in (1, 2):
        found = refusal(check, optimizer, cut_leaves(whole(PARAMS), num_ranks))
        assert re.match(f"optimizer must be element-wise to be sharded: on shards, .*({reason})", found)


def test_a_mask_by_size_is_refused_where_shards_are_smaller():
    assert KERNEL in refusal(check, optax.adamw(0.1, mask=by_size))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_parameter_of_one_element_is_on_one_rank_alone(num_ranks):
    """Its shard has its shape, but is padding on all other ranks."""
    shapes = {"one": (1,), "row": (3, 1)}
    leaves = cut_leaves({name: Leaf(shape, jnp.float32) for name, shape in shapes.items()}, num_ranks)
    check(optax.adamw(0.1), leaves)
    keeps = with_state(lambda params: jnp.zeros(1), lambda grads, state: grads["one"])
    for optimizer in (
        keeps, optax.clip_by_global_norm(1.0), of_gradients(lambda grads: grads | {"row": grads["row"] * grads["one"]})
    ):  # fmt: skip
        assert "is another computation" in refusal(check, optimizer, leaves)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_row_whose_shard_is_one_element_may_not_scale_the_columns_of_another_parameter(num_ranks):
    leaves = cut_leaves({"kernel": Leaf((8, 2), jnp.float32), "bias": Leaf((1, 2), jnp.float32)}, num_ranks)
    scaled = of_gradients(lambda grads: grads | {"kernel": grads["kernel"] * grads["bias"]})
    assert refusal(check, scaled, leaves).startswith("optimizer must be element-wise")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bytes_of_a_number_are_not_equal_at_every_element(num_ranks):
    def by_bytes(grad):
        parts = jax.lax.bitcast_convert_type(jnp.float32(1.5) + jnp.zeros(()), jnp.uint8)
        return grad * parts[: len(grad)]

    leaves = cut_leaves({"w": Leaf((4,), jnp.float32)}, num_ranks)
    assert "'update.w' is another computation" in refusal(check, of_each_gradient(by_bytes), leaves)


def test_a_mask_by_size_is_judged_alike_on_one_rank_and_on_two():
    small = optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.size > 45, params))
    for num_ranks in (1, 2):
        check(small, cut_leaves({"w": Leaf((8, 5), jnp.float32)}, num_ranks))


def test_parameters_of_one_shape_must_be_cut_alike_if_they_meet():
    leaves = whole({name: jax.ShapeDtypeStruct((4, 4), jnp.float32) for name in "ab"})
    swap = of_gradients(lambda grads: {"a": grads["a"] + grads["b"], "b": grads["b"]})
    by_rows = {name: replace(leaf, cut=cut((4, 4), 2, [0])) for name, leaf in leaves.items()}
    check(swap, by_rows)
    by_columns = replace(leaves["a"], cut=cut((4, 4), 2, [1]))
    assert "add got incompatible shapes" in refusal(check, swap, by_rows | {"a": by_columns})


def test_what_is_not_cut_may_be_summed_but_not_meet_shards_by_place():
    params = {name: jax.ShapeDtypeStruct((4,), jnp.float32) for name in ("cut", "all")}
    leaves = cut_in_two(params) | whole({"all": params["all"]})
    check(of_gradients(lambda grads: {"cut": grads["cut"] * jnp.sum(grads["all"]), "all": grads["all"]}), leaves)
    for meet in (
        lambda grads: {"cut": grads["cut"] * grads["all"], "all": grads["all"]},
        lambda grads: {"cut": grads["cut"], "all": grads["all"] * jnp.sum(grads["cut"])},
        lambda grads: {"cut": grads["cut"], "all": grads["cut"]},
    ):
        assert refusal(check, of_gradients(meet), leaves).startswith("optimizer must be element-wise")


def test_state_leaves_are_cut_like_the_parameter_that_they_mirror():
    optimizer = optax.chain(
        optax.masked(optax.trace(0.9, accumulator_dtype=jnp.bfloat16), no_biases),
        optax.inject_hyperparams(optax.scale)(SCHEDULE),
        with_state(lambda params: {"key": jax.random.key(0), "history": jnp.zeros(3)}, lambda grads, state: state),
    )
    state = check(optimizer)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(optimizer.init, PARAMS))
    found = named_leaves(state)
    trace = "0.inner_state.trace."
    cut_ones = {f"{trace}layers.0.kernel": (3, 4), f"{trace}layers.1.kernel": (3, 4), f"{trace}scale": ()}
    assert {name: leaf.shape for name, leaf in found.items() if leaf.cut is not None} == cut_ones
    assert {str(found[name].dtype) for name in cut_ones} == {"bfloat16"} and len(found) == len(cut_ones) + 5


@pytest.mark.parametrize("name", [None, "count"])
def test_a_parameter_may_have_the_name_of_a_count(name):
    params = jax.ShapeDtypeStruct((), jnp.float32)
    leaves = cut_in_two(params if name is None else {name: params})
    assert [leaf.cut is not None for leaf in jax.tree.leaves(check(optax.adam(0.1), leaves))] == [False, True, True]


def test_a_flax_state_and_an_empty_parameter():
    params = nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Param)
    state = check(optax.adamw(0.1), cut_in_two(params))
    assert [leaf.shape for leaf in jax.tree.leaves(state) if leaf.cut is not None] == [(4,), (3, 4)] * 2
    check(optax.adagrad(0.1), cut_in_two({"empty": jnp.ones((0, 3)), "w": jnp.ones((2, 3))}))


def noisy(scale):
    def update(updates, state, params=None):
        del params
        by_host = jax.pure_callback(lambda: np.float32(scale), jax.ShapeDtypeStruct((), np.float32))
        return jax.tree.map(lambda leaf: leaf * by_host * jax.lax.axis_index("data"), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


UNLIKE = {
    "sgd": lambda: optax.sgd(0.1),
    "another rate": lambda: optax.sgd(0.10000001),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 9)),
    "longer schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 10)),
    "rate as state": lambda: optax.inject_hyperparams(optax.sgd)(0.1),
    "another rate as state": lambda: optax.inject_hyperparams(optax.sgd)(0.2),
    "adam": lambda: optax.adam(0.1),
    "bf16 moments": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "mask": lambda: optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    "rates by index": lambda: optax.sgd(lambda count: jnp.asarray(np.linspace(0.1, 0.0, 9))[count]),
    "other rates by index": lambda: optax.sgd(lambda count: jnp.asarray(np.linspace(0.1, 0.01, 9))[count]),
    "micro-steps": lambda: optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
    "more micro-steps": lambda: optax.MultiSteps(optax.adam(0.1), 5).gradient_transformation(),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1)),
    "another seed": lambda: optax.chain(optax.add_noise(0.1, 0.5, 4), optax.sgd(0.1)),
    "rank and host": lambda: noisy(1),
}


def test_optimizers_are_described_alike_only_if_they_compute_alike():
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}

    def describe(make):
        return describe_update(make(), params, [("data", 4)])

    described = {name: describe(make) for name, make in UNLIKE.items()}
    assert len(set(described.values())) == len(described), described
    assert described == {name: describe(make) for name, make in UNLIKE.items()}
