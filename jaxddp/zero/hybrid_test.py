"""Meshes with replicas: shards within a group of ranks, sums across the groups, and the training of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxddp
from jaxddp.checkpoint import Checkpoints
from jaxddp.instruments.schedule import read_schedule

SHAPES = {"2x2": (4, 2), "2x4": (8, 2), "4x2": (8, 4)}
STRATEGIES = {
    **{name: factory() for name, factory in jaxddp.STRATEGIES.items()},
    "zero1": jaxddp.zero1(0.0005),  # several buckets
    "zero2 by leaves": jaxddp.zero2(0.0005, shard="leaves"),
    "zero3": jaxddp.zero3(min_shard_elements=10),
}
QUICK = (("naive", "2x2"), ("zero1", "2x4"), ("zero3", "4x2"))  # by default: one of each stage and shape
dense = jaxddp.layer(lambda params, x: jnp.tanh(x @ params["kernel"] + params["bias"]))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def loss_fn(params, batch):
    x = batch["x"]
    for one in params["layers"]:
        x = dense(one, x)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def model():
    rng = np.random.default_rng(0)
    layers = [{"kernel": rng.normal(size=(7, 7)) / 3, "bias": rng.normal(size=7)} for _ in range(3)]
    return {"layers": layers, "head": rng.normal(size=(7, 3))}


def batches(count=4):
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(16, 7)), "y": rng.normal(size=(16, 3))} for _ in range(count)]


def trained(trainer, state, steps):
    for batch in steps:
        state, metrics = trainer.step(state, batch)
    return state, metrics


def assert_equal(found, expected):
    """Up to rounding in float64, over a few steps of a few sums."""
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-12), found, expected)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[] if (name, shape) in QUICK else pytest.mark.full)
        for name in STRATEGIES
        for shape in SHAPES
    ],
)
def test_training_is_that_of_one_device_and_compiled_as_planned(name, shape):
    num_ranks, replicas = SHAPES[shape]
    params, optimizer = model(), optax.adamw(1e-2)
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optimizer)
    opt_state = clipped.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = clipped.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches():
        params, opt_state = step(params, opt_state, batch)

    mesh = jaxddp.data_mesh(num_ranks, replicas=replicas)
    trainer = jaxddp.Trainer(loss_fn, optimizer, STRATEGIES[name], mesh, max_grad_norm=0.5, num_microbatches=2)
    state, _ = trained(trainer, trainer.init(model()), batches())
    jaxddp.check_replicas(trainer, state)
    assert_equal(trainer.params(state), params)
    assert_equal(trainer.evaluate(state, batches()[0]), loss_fn(params, batches()[0]))

    compiled = read_schedule(trainer.compile(state, batches()[0])).gradient_groups()
    assert sorted(trainer.planned_groups(state, batches()[0])) == compiled
    groups = {kind: {group for found, _, group in compiled if found == kind} for kind, _, _ in compiled}
    within, across = tuple(range(num_ranks // replicas)), tuple(range(0, num_ranks, num_ranks // replicas))
    everyone = tuple(range(num_ranks))
    layout = trainer.layout(state)
    if layout.cuts:
        assert groups.pop("all-reduce") - {everyone} == {across}  # zero3 sums small gradients over everyone
        has_owners = layout.owners is not None
        swaps = {"all-to-all": {within}} if has_owners else {}
        assert groups == {"reduce-scatter": {within}, "all-gather": {within}} | swaps
        moment = state.opt_state.owned["float64"] if has_owners else state.opt_state[0].mu["head"]
        elements = 4 * 2 * 49 if has_owners else 21  # the fullest of 2 ranks owns two kernels, of 4 one
        assert moment.addressable_shards[0].data.size == -(-elements // len(within))
    else:
        assert groups == {"all-reduce": {everyone}}


def noisy_loss(params, model_state, batch, key):
    x = jnp.tanh(batch["x"] @ params["up"]) * jax.random.bernoulli(key, 0.5, (batch["x"].shape[0], 40))
    squares = jnp.sum((x @ params["down"] - batch["y"]) ** 2, axis=1)
    state = {"mean": 0.9 * model_state["mean"] + 0.1 * x.mean(0), "count": model_state["count"] + 1}
    aux = {"mean": squares.mean(), "own": jaxddp.Weighted(squares.sum(), 1.0), "each": jaxddp.PerExample(squares)}
    return jaxddp.Weighted(jnp.sum(squares * batch["mask"]), jnp.sum(batch["mask"])), (state, aux)


OPTIONS = {
    "zero1": (jaxddp.zero1(), {}),
    "zero1, narrow": (jaxddp.zero1(), {"compute_dtype": jnp.float32}),
    "bucketed, hook": (jaxddp.bucketed(hook=jaxddp.hooks.bf16), {}),
    "zero3": (jaxddp.zero3(min_shard_elements=0), {"num_microbatches": 2}),
    "state of rank 0": (jaxddp.bucketed(), {"state_sync": "first"}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "zero3" else pytest.mark.full) for name in OPTIONS],
)
def test_ranks_are_those_of_one_axis_to_keys_states_and_metrics(name):
    """A rank's number counts over both axes, so all is as on one axis of as many ranks."""
    strategy, options = OPTIONS[name]
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(7, 40)) / 3, "down": rng.normal(size=(40, 3)) / 6}
    steps = [batch | {"mask": np.arange(16.0) % 5} for batch in batches(3)]
    found = []
    for mesh in (jaxddp.data_mesh(8), jaxddp.data_mesh(8, replicas=2)):
        trainer = jaxddp.Trainer(noisy_loss, optax.adamw(1e-2), strategy, mesh, has_state=True, has_aux=True, **options)
        state = trainer.init(params, model_state={"mean": jnp.zeros(40), "count": jnp.zeros((), jnp.int32)})
        state, metrics = trained(trainer, state, steps)
        measured = trainer.evaluate(
            state, [{"x": np.ones((5, 7))}, {"x": np.zeros((3, 7))}],
            lambda params, model_state, batch: {"sum": jaxddp.Sum((batch["x"] @ params["up"]).sum(1))},
        )  # fmt: skip
        found.append((trainer.params(state), trainer.model_state(state), metrics, measured))
    # Sums of float32 or bfloat16 are rounded in another order, and Adam divides by their size.
    atol = 1e-2 if "," in name else 1e-12
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=atol, atol=atol), *found)


def test_checkpoints_are_of_no_mesh(tmp_path):
    hybrid = jaxddp.Trainer(loss_fn, optax.adam(1e-2), STRATEGIES["zero3"], jaxddp.data_mesh(8, replicas=2))
    flat = jaxddp.Trainer(loss_fn, optax.adam(1e-2), STRATEGIES["zero1"], jaxddp.data_mesh(4))
    first, second = batches()[:2], batches()[2:]
    whole, _ = trained(flat, flat.init(model()), batches())
    for number, (one, other) in enumerate(((hybrid, flat), (flat, hybrid))):
        with Checkpoints(tmp_path / str(number)) as checkpoints:
            state, _ = trained(one, one.init(model()), first)
            checkpoints.save(one, state)
            state, _ = checkpoints.restore(other, model())
        state, _ = trained(other, state, second)
        assert_equal(other.params(state), flat.params(whole))


@pytest.mark.parametrize(("name", "sizes"), [("zero2 by leaves", (1, 2)), ("zero3", (2, 1))])
def test_no_collective_is_planned_along_an_axis_of_one_device(name, sizes):
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh(sizes, ("replica", "data"), axis_types=types, devices=jax.devices()[:2])
    trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), STRATEGIES[name], mesh)
    state = trainer.init(model())
    planned = trainer.planned(state, batches()[0])
    assert planned
    assert jaxddp.gradient_collectives(trainer.compile(state, batches()[0])) == sorted(planned)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_axes_of_ranks_in_another_order_than_the_mesh_has_them(name):
    types = (AxisType.Auto,) * 2
    swapped = jax.make_mesh((2, 2), ("data", "replica"), axis_types=types, devices=jax.devices()[:4])
    found = []
    for mesh in (jaxddp.data_mesh(4), swapped):
        axis = mesh.axis_names[::-1]
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), STRATEGIES[name], mesh, axis=axis)
        state, _ = trained(trainer, trainer.init(model()), batches())
        found.append(trainer.params(state))
    assert_equal(*found)


def test_a_shard_that_differs_from_its_replica_is_found():
    trainer = jaxddp.Trainer(loss_fn, optax.adam(1e-2), STRATEGIES["zero3"], jaxddp.data_mesh(8, replicas=4))
    state = trainer.init(model())
    head = state.params["head"]
    shards = [np.array(shard.data) for shard in head.addressable_shards]
    shards[5].reshape(-1)[0] += 0.25  # rank 5 is the second of its group, as ranks 1, 3 and 7 are of theirs
    arrays = [jax.device_put(data, shard.device) for data, shard in zip(shards, head.addressable_shards, strict=True)]
    head = jax.make_array_from_single_device_arrays(head.shape, head.sharding, arrays)
    with pytest.raises(jaxddp.ReplicaError, match=r"^params\.head of rank 5 differs "):
        jaxddp.check_replicas(trainer, state._replace(params=state.params | {"head": head}))


def test_bad_input():
    with pytest.raises(ValueError, match=r"^replicas \(=3\) must divide num_ranks \(=8\) into groups of at least 2"):
        jaxddp.data_mesh(8, replicas=3)
    with pytest.raises(ValueError, match=r"^replicas \(=8\) must divide num_ranks \(=8\) into groups of at least 2"):
        jaxddp.data_mesh(8, replicas=8)
    with pytest.raises(ValueError, match=r"^replicas \(=0\) must be a positive integer$"):
        jaxddp.data_mesh(8, replicas=0)
    with pytest.raises(ValueError, match=r"^axis \(='replica'\) must not be the name of the axis of replicas$"):
        jaxddp.data_mesh(8, axis="replica", replicas=2)
