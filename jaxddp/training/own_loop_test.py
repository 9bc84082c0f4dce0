"""A loop of one's own, by ``value_and_grad`` or by pieces: training as on one device, with the planned collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxddp
from jaxddp.communication.buckets import TensorSpec
from jaxddp.comparison_test import assert_near, drawn, grid, on_one_device, planned_collectives, refusal

pytestmark = pytest.mark.usefixtures("x64")
STRATEGIES = [jaxddp.naive(), jaxddp.flat(), jaxddp.overlapped(), jaxddp.bucketed(6e-4)]
BATCH_SPLIT = P(), P("data")
EXPLICIT = {"axis_type": AxisType.Explicit}
by_check = pytest.mark.parametrize("check_vma", [True, False])
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)


def make_params():
    return drawn(up=(8, 12), down=(12, 1), bias=1, unused=3)  # a bucket holds 629 bytes: up has its own


def make_batch(step=0, rows=16):
    return drawn([1, step], x=(rows, 8), y=(rows, 1))


def errors(params, batch):
    return (jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"] - batch["y"])[:, 0] ** 2


def mean_loss(params, batch):
    return errors(params, batch).mean()


ADAMW, BATCHES = optax.adamw(0.01), [make_batch(number) for number in range(5)]


@functools.cache
def trained_on_one_device():
    return on_one_device(mean_loss, make_params(), BATCHES, ADAMW)


def on_ranks(function, strategy, num_ranks=4, check_vma=True, in_specs=BATCH_SPLIT, axis_type=AxisType.Auto):
    mesh = grid(num_ranks, names=("data",), axis_type=axis_type)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma)
    return jaxddp.jit(mapped, strategy)


@pytest.mark.sample
@by_strategy
@pytest.mark.parametrize("options", [{}, {"check_vma": False}, EXPLICIT, EXPLICIT | {"check_vma": False}], ids=str)
def test_training_is_that_of_one_device_and_the_collectives_are_planned(strategy, options):
    def step(params, opt_state, batch):
        loss, grads = jaxddp.value_and_grad(mean_loss, strategy)(params, batch)
        updates, opt_state = ADAMW.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    params = make_params()
    run = on_ranks(step, strategy, in_specs=(P(), P(), P("data")), **options)
    by_rank = NamedSharding(grid(4, names=("data",), axis_type=options.get("axis_type", AxisType.Auto)), P("data"))
    mine, mine_state, loss_of = params, ADAMW.init(params), jax.jit(mean_loss)
    for batch in BATCHES:
        expected = loss_of(jax.device_get(mine), batch)
        placed = jax.device_put(batch, by_rank)
        loss, mine, mine_state = run(mine, mine_state, placed)
        assert_near(loss, expected)
    assert_near(mine, trained_on_one_device())
    in_order = [TensorSpec(name, params[name].shape, "float64") for name in ("bias", "down", "up")]
    planned = planned_collectives(strategy, strategy.plan(in_order), 4, "cpu")
    schedule = jaxddp.read_schedule(run.lower(mine, mine_state, placed).compile())
    assert sorted(schedule.gradient_collectives()) == sorted(planned)
    assert len(planned) == {"flat": 1, "bucketed": 2}.get(strategy.name, 3)
    assert [each.kind for each in schedule.collectives() if each.is_metrics] == ["all-reduce"]


@pytest.mark.parametrize("mapped", [lambda *args, **named: jax.jit(jax.vmap(*args, **named)), jax.pmap])
def test_an_axis_of_vmap_or_pmap_is_one_of_ranks(mapped):
    params, batch = make_params(), make_batch()
    step = functools.partial(jaxddp.value_and_grad(mean_loss, jaxddp.bucketed(6e-4), "ranks"), params)
    loss, grads = mapped(step, axis_name="ranks")(jax.tree.map(lambda leaf: leaf.reshape(4, 4, -1), batch))
    assert_near(jax.tree.map(lambda leaf: leaf[3], (loss, grads)), jax.value_and_grad(mean_loss)(params, batch))


def test_losses_with_weights_aux_and_noise_of_each_rank():
    strategy = jaxddp.bucketed(6e-4)

    def loss_fn(params, batch, key, scale=1.0):
        each = errors(params, batch)
        noise = scale * jax.random.uniform(key, each.shape)
        marked = {"mean": jaxddp.Mean(each), "each": jaxddp.PerExample(noise), "share": jnp.mean(batch["mask"])}
        total = jnp.sum(each * noise * batch["mask"]) + jnp.sum(params["bias"]) * noise.sum()
        return jaxddp.Weighted(total, jnp.sum(batch["mask"])), marked

    def step(params, batch, key):
        own = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return jaxddp.value_and_grad(loss_fn, strategy, has_aux=True)(params, batch, own, scale=2.0)

    batch = make_batch() | {"mask": (np.arange(16) < 7).astype(float)}  # the last ranks have nothing that counts
    params, key = make_params(), jax.random.key(3)
    (loss, aux), grads = on_ranks(step, strategy, in_specs=(P(), P("data"), P()))(params, batch, key)
    noise = np.concatenate([2 * jax.random.uniform(jax.random.fold_in(key, rank), (4,)) for rank in range(4)])

    def full(params):
        return (jnp.sum(errors(params, batch) * noise * batch["mask"]) + jnp.sum(params["bias"]) * noise.sum()) / 7

    assert_near((loss, grads), jax.value_and_grad(full)(params))
    assert_near(aux["mean"], errors(params, batch).mean())
    assert_near(aux["each"], noise)


@by_check
def test_a_gradient_that_is_only_what_a_rank_closes_over_is_averaged(check_vma):
    strategy = jaxddp.bucketed()

    def step(params, batch):
        mine = batch["x"].sum()  # no argument of the loss function

        def loss_fn(params, batch):
            return (jnp.sum(params["bias"]) + jnp.sum(params["unused"])) * mine

        return jaxddp.value_and_grad(loss_fn, strategy)(params, ())

    params, batch = make_params(), make_batch()
    run = on_ranks(step, strategy, check_vma=check_vma)
    _, grads = run(params, batch)
    assert_near(grads["bias"], [batch["x"].sum() / 4])
    compiled = jaxddp.gradient_collectives(run.lower(params, batch).compile())
    assert compiled == [("all-reduce", 4 * 8)]  # as planned, in one bucket


@by_check
def test_a_loss_that_is_a_mean_over_ranks_already_has_the_same_gradient(check_vma):
    strategy, params, batch = jaxddp.bucketed(), make_params(), make_batch()

    def loss_fn(params, batch):
        return jax.lax.pmean(mean_loss(params, batch), "data")

    found = on_ranks(jaxddp.value_and_grad(loss_fn, strategy), strategy, check_vma=check_vma)(params, batch)
    assert_near(found, jax.value_and_grad(mean_loss)(params, batch))


@pytest.mark.sample
@by_strategy
@by_check
def test_on_two_axes_only_the_given_one_is_reduced(strategy, check_vma):
    """Examples are split over the first, columns of the hidden layer over the second."""
    mesh = grid(2, 2, names=("batch", "model"))

    def own_part(params, batch):  # of the second axis
        shift = params.get("shift", 0)  # equal along it
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + shift - batch["y"]) ** 2)

    def step(params, batch):
        loss, grads = jaxddp.value_and_grad(own_part, strategy, "batch")(params, batch)
        return loss[None], grads

    params, batch = make_params(), make_batch()
    params = {name: params[name] for name in ("up", "down")}
    specs = {"up": P(None, "model"), "down": P("model")}
    if check_vma:  # autodiff sums its gradient over the second axis
        params, specs = params | {"shift": np.ones(())}, specs | {"shift": P()}
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P("batch")), out_specs=(P("model"), specs), check_vma=check_vma
    )
    run = jaxddp.jit(mapped, strategy)
    losses, grads = run(params, batch)
    parts = [params | {"up": params["up"][:, own], "down": params["down"][own]} for own in (slice(6), slice(6, 12))]
    expected = [jax.value_and_grad(own_part)(part, batch) for part in parts]
    assert_near(losses, [loss for loss, _ in expected])
    assert_near(grads["up"], np.concatenate([grads["up"] for _, grads in expected], 1))
    assert_near(grads["down"], np.concatenate([grads["down"] for _, grads in expected]))
    assert_near(grads.get("shift", 0), sum(grads.get("shift", 0) for _, grads in expected))
    collectives = jaxddp.read_schedule(run.lower(params, batch).compile()).collectives()
    assert {each.group for each in collectives} == {(0, 2)} | ({(0, 1)} if check_vma else set())


def test_results_are_differentiated_rightly_or_not_at_all():
    strategy, params, batch = jaxddp.bucketed(), make_params(), make_batch()

    def squares(grads):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))

    def step(params, batch):
        return jax.grad(lambda params: squares(jaxddp.value_and_grad(mean_loss, strategy)(params, batch)))(params)

    expected = jax.jit(jax.grad(lambda params: squares(jax.value_and_grad(mean_loss)(params, batch))))(params)
    assert_near(on_ranks(step, strategy)(params, batch), expected)
    assert "leave check_vma on" in refusal(on_ranks(step, strategy, check_vma=False), params, batch)


def test_parameters_may_be_marked_already_and_one_rank_sends_nothing():
    strategy = jaxddp.overlapped()

    def step(params, batch):
        return jaxddp.value_and_grad(mean_loss, strategy)(mark(params), batch)

    params, batch = make_params(), make_batch()
    for num_ranks, check_vma in ((2, True), (1, True), (1, False)):
        run = on_ranks(step, strategy, num_ranks, check_vma)
        assert_near(run(params, batch), jax.value_and_grad(mean_loss)(params, batch))
        if num_ranks == 1:
            program = run.lower(params, batch).compile()
            assert jaxddp.gradient_collectives(program) == []
            assert (" all-reduce(" in program.as_text()) == check_vma  # of the check, over one device


@pytest.mark.sample
@by_strategy
@by_check
def test_a_gradient_that_is_a_constant_is_sent_as_planned(strategy, check_vma):
    def loss_fn(params, batch):
        return mean_loss(params, batch) + 2 * params["slope"].sum() + (params["tilt"] * np.arange(6.0)).sum()

    params = make_params() | {"slope": np.ones((4, 4)), "tilt": np.ones(6)}
    run = on_ranks(jaxddp.value_and_grad(loss_fn, strategy), strategy, check_vma=check_vma)
    first = [TensorSpec(name, params[name].shape, "float64") for name in ("slope", "tilt", "bias", "down", "up")]
    planned = planned_collectives(strategy, strategy.plan(first), 4, "cpu")
    program = run.lower(params, make_batch()).compile()
    assert jaxddp.read_schedule(program).gradient_collectives() == sorted(planned)
    assert_near(run(params, make_batch()), jax.value_and_grad(loss_fn)(params, make_batch()))


def test_what_is_refused():
    for arguments, message in (
        ((mean_loss, jaxddp.zero1()), "strategy (='zero1') must not shard in value_and_grad"),
        ((mean_loss, jaxddp.flat(), ("data",)), "axis (=('data',)) must be the name of a mesh axis"),
    ):
        assert message in refusal(jaxddp.value_and_grad, *arguments)


def test_jit_keeps_its_options_and_adds_the_strategys():
    strategy, many = jaxddp.naive(), {"xla_cpu_enable_fast_math": False}
    for options in ({}, {"compiler_options": many}, {"compiler_options": None, "donate_argnums": 0}):
        jitted = jaxddp.jit(functools.partial(jnp.add, 1.0), strategy, **options)
        assert jitted(jnp.ones(3)).tolist() == [2.0] * 3
    assert "strategy (='naive') must be a strategy" in refusal(jaxddp.jit, jnp.sin, "naive")
    assert "unknown platform 'abacus'" in refusal(jaxddp.jit, jnp.sin, strategy, platform="abacus")


# Pieces: what ``plan_gradients``, ``sync_gradients`` and ``shard_optimizer`` cannot do right, they refuse


def mark(params):
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)


def test_a_plan_leaves_out_what_is_unused_or_empty():
    params = make_params() | {"empty": np.ones((0, 3)), "0-d": np.ones(())}
    strategy, batch = jaxddp.bucketed(), make_batch()
    plan = jaxddp.plan_gradients(strategy, jax.grad(mean_loss), params, make_batch(rows=4))

    def mean_gradients(params, batch):
        return jaxddp.sync_gradients(jax.grad(mean_loss)(mark(params), batch), plan, "data")

    run = on_ranks(mean_gradients, strategy)
    assert_near(run(params, batch), jax.grad(mean_loss)(params, batch))
    compiled = jaxddp.gradient_collectives(run.lower(params, batch).compile())
    assert compiled == [("all-reduce", 8 * sum(params[name].size for name in ("up", "down", "bias")))]


@by_check
def test_a_plan_may_meet_gradients_that_were_constant_when_it_was_made(check_vma):
    def with_slope(params, batch, is_used):
        return mean_loss(params, batch) + is_used * jnp.mean(batch["x"]) * jnp.sum(params["slope"])

    strategy, params, batch = jaxddp.bucketed(), make_params() | {"slope": np.ones(3)}, make_batch()
    grad_fn = jax.grad(with_slope)

    def without_slope(params, batch):
        return grad_fn(params, batch, 0) | {"slope": jnp.zeros(3)}

    plan = jaxddp.plan_gradients(strategy, without_slope, params, make_batch(rows=4))
    assert "slope" in plan.constants

    def mean_gradients(params, batch):
        return jaxddp.sync_gradients(grad_fn(mark(params), batch, 1), plan, "data")

    found = on_ranks(mean_gradients, strategy, check_vma=check_vma)(params, batch)
    assert_near(found, grad_fn(params, batch, 1))
    assert len({shard.data.tobytes() for shard in found["slope"].addressable_shards}) == 1

    def summed_already(params, batch):  # by autodiff, of what is not marked
        return jaxddp.sync_gradients(grad_fn(mark(params) | {"slope": params["slope"]}, batch, 1), plan, "data")

    if check_vma:
        found = refusal(on_ranks(summed_already, strategy), params, batch)
        assert "gradient of 'slope' does not vary over 'data'" in found


@pytest.mark.parametrize("kind", ["sync_gradients", "shard_optimizer"])
def test_a_gradient_that_varies_over_another_axis_only_is_refused(kind):
    """Examples are split over the first axis, columns of the weights over the second."""

    def square(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    mesh = grid(4, 2)
    params, x = {"w": jnp.arange(6.0).reshape(3, 2)}, jnp.arange(24.0).reshape(8, 3) / 10
    plan = jaxddp.plan_gradients(jaxddp.bucketed(), jax.grad(square), {"w": params["w"][:, :1]}, x[:2])
    optimizer = jaxddp.shard_optimizer(optax.sgd(1.0), "data")

    def means(params, x, is_marked):
        grads = jax.grad(square)(mark(params) if is_marked else params, x)
        if kind == "sync_gradients":
            return jaxddp.sync_gradients(grads, plan, "data")
        return jax.tree.map(jnp.negative, optimizer.update(grads, optimizer.init(params), params)[0])

    def run(is_marked):
        function = functools.partial(means, is_marked=is_marked)
        specs = {"in_specs": (P(None, "model"), P("data")), "out_specs": P(None, "model")}
        return jax.jit(jax.shard_map(function, mesh=mesh, **specs))(params, x)

    assert "gradient of 'w' does not vary over 'data'" in refusal(run, False)
    assert_near(run(True)["w"], 2 * jax.grad(square)(params, x)["w"])  # a mean of half as many


def test_a_plan_of_gradients_that_use_an_axis_that_is_not_bound_is_refused_in_one_line():
    params, batch = make_params(), make_batch()

    def noisy(params, batch):
        return mean_loss(params, batch) * jax.lax.axis_index("data")

    with pytest.raises(NameError, match="unbound axis name: data"):
        jaxddp.plan_gradients(jaxddp.bucketed(), jax.grad(noisy), params, batch)
