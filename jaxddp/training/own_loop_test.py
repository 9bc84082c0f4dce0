"""``value_and_grad`` and ``jit`` in a loop of one's own: training as on one device, with the planned collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxddp
from jaxddp.communication.buckets import TensorSpec
from jaxddp.communication.planned import planned_collectives

STRATEGIES = [jaxddp.naive(), jaxddp.flat(), jaxddp.overlapped(), jaxddp.bucketed(6e-4)]
BATCH_SPLIT = P(), P("data")
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def make_params():
    rng = np.random.default_rng(0)
    shapes = {"up": (8, 12), "down": (12, 1), "bias": (1,), "unused": (3,)}  # a bucket holds 629 bytes: up has its own
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def make_batch(step=0, rows=16):
    rng = np.random.default_rng([1, step])
    return {"x": rng.normal(size=(rows, 8)), "y": rng.normal(size=(rows, 1))}


def errors(params, batch):
    return (jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"] - batch["y"])[:, 0] ** 2


def mean_loss(params, batch):
    return errors(params, batch).mean()


def close(found, expected):
    jax.tree.map(lambda ours, full: np.testing.assert_allclose(ours, full, rtol=0, atol=1e-12), found, expected)


def on_ranks(function, strategy, num_ranks=4, check_vma=True, in_specs=BATCH_SPLIT):
    mesh = jaxddp.data_mesh(num_ranks)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma)
    return jaxddp.jit(mapped, strategy)


@pytest.mark.sample
@by_strategy
@pytest.mark.parametrize("check_vma", [True, False])
def test_training_is_that_of_one_device_and_the_collectives_are_planned(strategy, check_vma):
    optimizer = optax.adamw(0.01)

    def step(params, opt_state, batch):
        loss, grads = jaxddp.value_and_grad(mean_loss, strategy)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    @jax.jit
    def step_alone(params, opt_state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    params = make_params()
    run = on_ranks(step, strategy, check_vma=check_vma, in_specs=(P(), P(), P("data")))
    mine, mine_state = params, optimizer.init(params)
    full, full_state = params, optimizer.init(params)
    for number in range(5):
        batch = make_batch(number)
        loss, mine, mine_state = run(mine, mine_state, batch)
        expected, full, full_state = step_alone(full, full_state, batch)
        close(loss, expected)
    close(mine, full)
    in_order = [TensorSpec(name, params[name].shape, "float64") for name in ("bias", "down", "up")]
    planned = planned_collectives(strategy, strategy.plan(in_order), 4, "cpu")
    schedule = jaxddp.read_schedule(run.lower(mine, mine_state, batch).compile())
    assert sorted(schedule.gradient_collectives()) == sorted(planned)
    assert len(planned) == {"flat": 1, "bucketed": 2}.get(strategy.name, 3)
    assert [each.kind for each in schedule.collectives() if each.is_metrics] == ["all-reduce"]


@by_strategy
def test_losses_with_weights_aux_and_noise_of_each_rank(strategy):
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

    close((loss, grads), jax.value_and_grad(full)(params))
    close(aux["mean"], errors(params, batch).mean())
    close(aux["each"], noise)


@pytest.mark.parametrize("check_vma", [True, False])
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
    close(grads["bias"], [batch["x"].sum() / 4])
    assert jaxddp.gradient_collectives(run.lower(params, batch).compile()) == [
        ("all-reduce", 4 * 8)
    ]  # as planned, in one bucket


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_loss_that_is_a_mean_over_ranks_already_has_the_same_gradient(check_vma):
    strategy, params, batch = jaxddp.bucketed(), make_params(), make_batch()

    def loss_fn(params, batch):
        return jax.lax.pmean(mean_loss(params, batch), "data")

    found = on_ranks(jaxddp.value_and_grad(loss_fn, strategy), strategy, check_vma=check_vma)(params, batch)
    close(found, jax.value_and_grad(mean_loss)(params, batch))


@pytest.mark.sample
@by_strategy
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_two_axes_only_the_given_one_is_reduced(strategy, check_vma):
    """Examples are split over the first, columns of the hidden layer over the second."""
    mesh = jax.make_mesh((2, 2), ("batch", "model"), axis_types=(AxisType.Auto,) * 2)

    def own_part(params, batch):  # of the second axis
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    def step(params, batch):
        loss, grads = jaxddp.value_and_grad(own_part, strategy, "batch")(params, batch)
        return loss[None], grads

    params, batch = make_params(), make_batch()
    params = {name: params[name] for name in ("up", "down")}
    specs = {"up": P(None, "model"), "down": P("model")}
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P("batch")), out_specs=(P("model"), specs), check_vma=check_vma
    )
    run = jaxddp.jit(mapped, strategy)
    losses, grads = run(params, batch)
    parts = [{"up": params["up"][:, mine], "down": params["down"][mine]} for mine in (slice(0, 6), slice(6, 12))]
    expected = [jax.value_and_grad(own_part)(part, batch) for part in parts]
    close(losses, [loss for loss, _ in expected])
    close(grads["up"], np.concatenate([grads["up"] for _, grads in expected], 1))
    close(grads["down"], np.concatenate([grads["down"] for _, grads in expected]))
    collectives = jaxddp.read_schedule(run.lower(params, batch).compile()).collectives()
    assert {each.group for each in collectives} == {(0, 2)}


def test_results_are_differentiated_rightly_or_not_at_all():
    strategy, params, batch = jaxddp.bucketed(), make_params(), make_batch()

    def squares(grads):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))

    def step(params, batch):
        return jax.grad(lambda params: squares(jaxddp.value_and_grad(mean_loss, strategy)(params, batch)))(params)

    expected = jax.grad(lambda params: squares(jax.value_and_grad(mean_loss)(params, batch)))(params)
    close(on_ranks(step, strategy)(params, batch), expected)
    with pytest.raises(ValueError, match=r"^results of value_and_grad must not .* leave check_vma on"):
        on_ranks(step, strategy, check_vma=False)(params, batch)


def test_parameters_may_be_marked_already_and_one_rank_sends_nothing():
    strategy = jaxddp.overlapped()

    def step(params, batch):
        params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
        return jaxddp.value_and_grad(mean_loss, strategy)(params, batch)

    params, batch = make_params(), make_batch()
    for num_ranks, check_vma in ((2, True), (1, True), (1, False)):
        run = on_ranks(step, strategy, num_ranks, check_vma)
        close(run(params, batch), jax.value_and_grad(mean_loss)(params, batch))
    assert jaxddp.read_schedule(run.lower(params, batch).compile()).collectives() == []


def test_parameters_without_a_gradient_are_not_sent():
    shapes = {"unused": (2,), "0-d": (), "of one": (1,), "empty": (0, 3)}
    unused = {name: np.ones(shape) for name, shape in shapes.items()}
    params = make_params() | unused
    run = on_ranks(jaxddp.value_and_grad(mean_loss, jaxddp.flat()), jaxddp.flat())
    program = run.lower(params, make_batch()).compile()
    num_bytes = 8 * sum(leaf.size for name, leaf in params.items() if name not in unused)
    assert jaxddp.read_schedule(program).gradient_collectives() == [("all-reduce", num_bytes)]
    grads = run(params, make_batch())[1]
    assert {name: grads[name].shape for name in unused} == shapes


@pytest.mark.sample
@by_strategy
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gradient_that_is_a_constant_is_sent_as_planned(strategy, check_vma):
    def loss_fn(params, batch):
        return mean_loss(params, batch) + 2 * params["slope"].sum() + (params["tilt"] * np.arange(6.0)).sum()

    params = make_params() | {"slope": np.ones((4, 4)), "tilt": np.ones(6)}
    run = on_ranks(jaxddp.value_and_grad(loss_fn, strategy), strategy, check_vma=check_vma)
    first = [TensorSpec(name, params[name].shape, "float64") for name in ("slope", "tilt", "bias", "down", "up")]
    planned = planned_collectives(strategy, strategy.plan(first), 4, "cpu")
    program = run.lower(params, make_batch()).compile()
    assert jaxddp.read_schedule(program).gradient_collectives() == sorted(planned)
    close(run(params, make_batch()), jax.value_and_grad(loss_fn)(params, make_batch()))


def test_what_a_hook_sends_is_planned_where_the_map_checks_too():
    strategy, planned = jaxddp.bucketed(hook=jaxddp.hooks.bf16), []

    def step(params, batch):
        planned.append(planned_collectives(strategy, strategy.plan([TensorSpec("up", (8, 12), "float64")]), 4, "cpu"))
        return jaxddp.value_and_grad(mean_loss, strategy)(params, batch)

    for check_vma in (True, False):
        on_ranks(step, strategy, check_vma=check_vma).lower(make_params(), make_batch())
    assert planned == 2 * [[("all-reduce", 4 * 8 * 12)]]  # bfloat16 travels as float32 between CPUs


def test_what_xla_keeps_on_one_rank_is_no_collective_of_the_plan():
    run = on_ranks(jaxddp.value_and_grad(mean_loss, jaxddp.bucketed()), jaxddp.bucketed(), num_ranks=1)
    program = run.lower(make_params(), make_batch()).compile()
    assert " all-reduce(" in program.as_text()  # of check_vma, over one device
    assert jaxddp.read_schedule(program).gradient_collectives() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mean_loss, jaxddp.zero1()), r"strategy \(='zero1'\) must not shard in value_and_grad: use a Trainer, or .*"
         r"jax\.grad.* to jaxddp\.shard_optimizer"),
        ((mean_loss, jaxddp.zero3()), r"strategy \(='zero3'\) must not shard in value_and_grad"),
        ((mean_loss, jaxddp.bucketed), r"strategy \(=<function bucketed .*\) must be a strategy"),
        ((3, jaxddp.flat()), r"loss_fn \(=3\) must be a function"),
        ((mean_loss, jaxddp.flat(), ("data",)), r"axis \(=\('data',\)\) must be the name of a mesh axis"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        jaxddp.value_and_grad(*arguments)


def test_an_axis_that_is_not_bound_is_one_line():
    with pytest.raises(ValueError, match=r"^axis \(='data'\) must be bound: call this inside jax\.shard_map over it$"):
        jaxddp.value_and_grad(mean_loss, jaxddp.flat())(make_params(), make_batch())


def test_jit_keeps_its_options_and_adds_the_strategys():
    strategy, many = jaxddp.naive(), {"xla_cpu_enable_fast_math": False}
    for options in ({}, {"compiler_options": many}, {"compiler_options": None, "donate_argnums": 0}):
        jitted = jaxddp.jit(functools.partial(jnp.add, 1.0), strategy, **options)
        assert jitted(jnp.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(ValueError, match=r"^strategy \(='naive'\) must be a strategy"):
        jaxddp.jit(jnp.sin, "naive")
    with pytest.raises(ValueError, match=r"^unknown platform 'abacus'"):
        jaxddp.jit(jnp.sin, strategy, platform="abacus")
