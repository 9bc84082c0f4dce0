"""What compressed gradients are, what is remembered of them, and what travels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxddp
from jaxddp.communication import compression
from jaxddp.communication.low_rank import merge_memory
from jaxddp.strategy import planned_collectives

NUM_RANKS = 4
SHAPES = {"a": (12, 10), "b": (10,), "c": (2, 3, 8)}  # factors of rank 2 are smaller than "a" and "c"
BF16_ROUNDING, FP16_ROUNDING = 2.0**-8, 2.0**-11  # half of the last place, of 8 and 11 bits
FP16_LEAST = 2.0**-25  # half of the last place below 2^-14


def linear_loss(params, batch):
    """Its gradient is the batch: each example is one of gradients."""
    grads = {name: batch[name].mean(0) for name in params}
    return sum(jnp.vdot(params[name], grads[name]) for name in params)


def trainer_of(strategy, num_ranks=NUM_RANKS, loss_fn=linear_loss, optimizer=None, **options):
    """By default a step moves parameters by minus the averaged gradient."""
    return jaxddp.Trainer(loss_fn, optimizer or optax.sgd(1.0), strategy, jaxddp.data_mesh(num_ranks), **options)


def zero_params():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def gradients(seed=0, num_examples=NUM_RANKS):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(num_examples, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def means_of(strategy, grads, **options):
    """What a strategy makes of gradients of which each rank has one."""
    trainer = trainer_of(strategy, **options)
    state, _ = trainer.step(trainer.init(zero_params()), grads)
    assert jaxddp.gradient_collectives(trainer.compile(state, grads)) == sorted(trainer.planned(state, grads))
    return jax.tree.map(lambda leaf: -np.asarray(leaf), trainer.params(state)), state


def with_compression(how):
    return {
        "all-reduce": jaxddp.bucketed(2e-4, compression=how),
        "reduce-scatter": jaxddp.zero1(2e-4, compression=how),
        "reduce-scatter by micro-batch": jaxddp.zero2(2e-4, compression=how),
    }


routes = pytest.mark.parametrize("route", with_compression(compression.none))


# Casts


@routes
@pytest.mark.parametrize(
    "how, rounding, least",
    [(compression.bf16, BF16_ROUNDING, 0), (compression.fp16, FP16_ROUNDING, FP16_LEAST)],
    ids=["bf16", "fp16"],
)
def test_a_cast_costs_one_rounding_for_each_rank_and_no_more(how, rounding, least, route):
    grads = gradients()
    means, _ = means_of(with_compression(how)[route], grads)
    for name, grad in grads.items():
        off = np.abs(means[name] - grad.mean(0))
        # Each summand is rounded once, and each of N - 1 sums and the result once: of no more than all absolute values.
        assert np.all(off <= (NUM_RANKS + 1) * (rounding * np.abs(grad).mean(0) + least))
        assert off.max() > rounding / 8 * np.abs(grad.mean(0)).max()  # it was rounded indeed


def test_float16_sums_do_not_overflow():
    grads = {name: np.full((NUM_RANKS, *shape), 60_000, np.float32) for name, shape in SHAPES.items()}
    means, _ = means_of(jaxddp.flat(compression=compression.fp16), grads)  # the sum of 240,000 is above 65,504
    for name in SHAPES:
        np.testing.assert_array_equal(means[name], grads[name][0])  # 60,000 and its quarter are float16 numbers


def test_casts_work_in_a_users_own_shard_map():
    grads, strategy = gradients(), jaxddp.bucketed(2e-4, compression=compression.bf16)
    plan = strategy.plan([jaxddp.TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()])

    def sync(tree, how):
        return jaxddp.sync_gradients(jax.tree.map(lambda leaf: leaf[0], tree), plan, "data", compression=how)

    def run(how):
        mesh, by_rank = jaxddp.data_mesh(NUM_RANKS), PartitionSpec("data")
        on_ranks = jax.shard_map(lambda tree: sync(tree, how), mesh=mesh, in_specs=by_rank, out_specs=PartitionSpec())
        return jax.jit(on_ranks, compiler_options=jaxddp.compile_options(strategy, "cpu"))(grads)

    means, _ = means_of(strategy, grads)
    jax.tree.map(np.testing.assert_array_equal, dict(run(compression.bf16)), means)
    with pytest.raises(ValueError, match=r"^compression \(='powersgd:2'\) must be stateless in sync_gradients"):
        run(compression.powersgd(2))


# PowerSGD


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlapped"])
def test_a_sum_of_low_rank_arrives_whole_whatever_its_summands_are(strategy):
    """Only the sum has rank 2: what cancels between ranks stays where it is, in their errors."""
    rng, grads = np.random.default_rng(0), gradients()
    for name, shape in SHAPES.items():
        if len(shape) > 1:
            n, m = int(np.prod(shape[:-1])), shape[-1]
            low = (rng.normal(size=(n, 2)) @ rng.normal(size=(2, m))).reshape(shape)
            grads[name] = (grads[name] - grads[name].mean(0) + low).astype(np.float32)
    means, state = means_of(jaxddp.make_strategy(strategy, compression=compression.powersgd(2)), grads)
    for name in SHAPES:
        # float32: products of three matrices whose elements are sums of up to 12 numbers of order 1.
        np.testing.assert_allclose(means[name], grads[name].mean(0), atol=1e-5)
    assert set(state.memory) == {"a", "c"}
    for name, memory in state.memory.items():
        left_out = (grads[name] - grads[name].mean(0)) / NUM_RANKS
        np.testing.assert_allclose(memory.error, left_out, atol=1e-5)
        np.testing.assert_array_equal(memory.factor, np.broadcast_to(memory.factor[:1], memory.factor.shape))


def weighted_loss(params, batch):
    """The same with weights: its gradient is the weighted mean of the batch."""
    weight = batch["weight"]
    each = jax.vmap(linear_loss, (None, 0))(params, {name: batch[name][:, None] for name in params})
    return jaxddp.Weighted(each @ weight, weight.sum())


@pytest.mark.parametrize("loss_fn, num_microbatches", [(linear_loss, 2), (weighted_loss, 1)])
def test_what_was_not_sent_is_in_the_errors_of_all_ranks(loss_fn, num_microbatches):
    strategy = jaxddp.bucketed(2e-4, compression=compression.powersgd(2))
    trainer = trainer_of(strategy, loss_fn=loss_fn, num_microbatches=num_microbatches)
    state, expected = trainer.init(zero_params()), {name: 0 for name in SHAPES}
    for step, scale in enumerate((1.0, 100.0, 0.01)):  # of the weights, which must not matter to what is remembered
        grads = gradients(step, 2 * NUM_RANKS)
        weight = np.ones(2 * NUM_RANKS, np.float32)
        if loss_fn is weighted_loss:
            weight = scale * np.arange(1, 2 * NUM_RANKS + 1, dtype=np.float32)
        state, _ = trainer.step(state, grads | {"weight": weight})
        for name, grad in grads.items():
            expected[name] = expected[name] + np.average(grad, axis=0, weights=weight)
    lacking = merge_memory(state.memory)
    assert all(np.abs(lacking[name].error).max() > 0.1 for name in ("a", "c"))  # there is something to remember
    for name, param in trainer.params(state).items():
        lack = lacking[name].error if name in lacking else 0
        # float32: three steps of sums of 8 numbers of order 1.
        np.testing.assert_allclose(lack - param, expected[name], atol=1e-5)


def test_nothing_moves_where_nothing_counts():
    trainer = trainer_of(jaxddp.flat(compression=compression.powersgd(2)), loss_fn=weighted_loss)
    state, _ = trainer.step(trainer.init(zero_params()), gradients() | {"weight": np.ones(NUM_RANKS, np.float32)})
    before = jax.tree.map(np.array, (state.params, state.memory))
    state, _ = trainer.step(state, gradients(1) | {"weight": np.zeros(NUM_RANKS, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.memory), before)


def test_gradients_of_zero_do_not_end_it():
    """Factors of zeros would stay zeros; those of the step before are kept."""
    trainer = trainer_of(jaxddp.flat(compression=compression.powersgd(2)))
    state, grads = trainer.init(zero_params()), gradients()
    for _ in range(2):
        state, _ = trainer.step(state, jax.tree.map(np.zeros_like, grads))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(trainer.params(state)))
    state, _ = trainer.step(state, grads)
    direct, _ = trainer.step(trainer.init(zero_params()), grads)
    jax.tree.map(np.testing.assert_array_equal, trainer.params(state), trainer.params(direct))


def test_with_feedback_it_arrives_where_without_it_never_does():
    """A quadratic under noise that cancels over two steps, and is all that rank 1 can send meanwhile."""
    target = np.random.default_rng(0).normal(size=(12, 10)).astype(np.float32)
    target -= target.mean(0)
    target -= target.mean(1, keepdims=True)
    noise = np.full_like(target, 5)  # its one singular value is 55; the target's, in other directions, are up to 6

    def loss_fn(params, batch):
        return jnp.mean(jax.vmap(lambda x: 0.5 * jnp.sum((params["w"] - x) ** 2))(batch))

    trainer = trainer_of(jaxddp.flat(compression=compression.powersgd(1)), 2, loss_fn, optax.sgd(0.02))

    def distance(keeps_error):
        state = trainer.init({"w": jnp.zeros_like(target)})
        for step in range(600):
            state, _ = trainer.step(state, np.stack([target + (-1) ** step * noise] * 2))
            if not keeps_error:
                (memory,) = state.memory.values()
                state.memory["w"] = memory._replace(error=jnp.zeros_like(memory.error))
        w = trainer.params(state)["w"]
        return np.linalg.norm(w - w.mean() - target) / np.linalg.norm(target)  # beside the noise

    assert distance(keeps_error=True) < 0.2  # seen: 0.05
    assert distance(keeps_error=False) > 0.8  # seen: 1.00


def test_only_what_is_trained_and_travels_is_remembered():
    how = compression.powersgd(2)
    state = trainer_of(jaxddp.naive(compression=how), trainable=lambda name: name != "a").init(zero_params())
    assert set(state.memory) == {"c"}
    assert state.memory["c"].error.shape == (NUM_RANKS, 2, 3, 8)
    assert {shard.data.shape for shard in state.memory["c"].error.addressable_shards} == {(1, 2, 3, 8)}
    assert trainer_of(jaxddp.naive(compression=compression.bf16)).init(zero_params()).memory == ()


def test_memory_is_donated_and_is_wide():
    trainer = trainer_of(jaxddp.flat(compression=compression.powersgd(2)))
    state = trainer.init(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), zero_params()))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.memory)} == {np.dtype("float32")}
    assert jax.eval_shape(lambda: trainer.abstract_state(zero_params()).memory) == jax.eval_shape(lambda: state.memory)
    after, _ = trainer.step(state, gradients())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.memory))
    assert after.params["a"].dtype == jnp.bfloat16 and after.memory["a"].error.dtype == np.float32


# What travels


TENSORS = [jaxddp.TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]
ONE_BUCKET = jaxddp.bucketed(None).plan(TENSORS)  # 178 elements; 3 x (30 + 3 + 12) in chunks of thirds, padded


@pytest.mark.parametrize(
    "how, platform, num_bytes",
    [
        (compression.none, "cpu", [4 * 178]),
        (compression.noop, "cpu", []),
        (compression.bf16, "gpu", [2 * 178]),
        (compression.bf16, "cpu", [4 * 178]),  # XLA sums bfloat16 as float32 there
        (compression.fp16, "gpu", [2 * 178]),
        (compression.fp16, "cpu", [2 * 178]),
        # Of "a" 12 x 2 and 10 x 2, of "c" 6 x 2 and 8 x 2, and all 10 of "b" beside the first.
        (compression.powersgd(2), "gpu", [4 * (24 + 10 + 12), 4 * (20 + 16)]),
        (compression.powersgd(2, min_compression=3), "gpu", [4 * 178]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_bytes_on_the_wire(how, platform, num_bytes):
    planned = planned_collectives(jaxddp.bucketed(None, compression=how), ONE_BUCKET, 3, platform)
    assert planned == [("all-reduce", size) for size in num_bytes]


def test_parameters_travel_as_they_are():
    plan = dataclasses.replace(ONE_BUCKET, gathers=ONE_BUCKET.buckets)
    width = 3 * (40 + 4 + 16)
    for how, size in ((compression.bf16, 2), (compression.fp16, 2), (compression.none, 4)):
        planned = planned_collectives(jaxddp.zero1(None, compression=how), plan, 3, "gpu")
        assert planned == [("reduce-scatter", size * width), ("all-gather", 4 * width)]


# What is refused


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "4", None])
def test_ranks_that_are_none(rank):
    with pytest.raises(ValueError, match=rf"^rank \(={rank!r}\) must be a positive integer$"):
        compression.powersgd(rank)


@pytest.mark.parametrize("least", [0.5, float("inf"), float("nan"), "2"])
def test_compressions_that_are_none(least):
    with pytest.raises(ValueError, match=rf"^min_compression \(={least!r}\) must be a finite number of at least 1$"):
        compression.powersgd(4, min_compression=least)


def test_names():
    for name in ("none", "noop", "bf16", "fp16", "powersgd:4"):
        assert compression.make_compression(name).name == name
    with pytest.raises(ValueError, match=r"^unknown compression 'zip': one of none, noop, bf16, fp16, powersgd:RANK$"):
        compression.make_compression("zip")
    for rank in ("", "0", "x", "-1"):
        with pytest.raises(ValueError, match=r"^rank \(=.*\) must be a positive integer$"):
            compression.make_compression(f"powersgd:{rank}")


@pytest.mark.parametrize("factory", [jaxddp.zero1, jaxddp.zero2, jaxddp.zero3])
def test_powersgd_needs_whole_gradients(factory):
    with pytest.raises(ValueError, match=r"^compression \(='powersgd:4'\) must .*$"):
        factory(compression=compression.powersgd(4))
