"""Data x tensor parallelism: axes of the mesh that are XLA's, and the training of one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import jaxddp
from jaxddp import targets
from jaxddp.checkpoint.checkpoints_test import assert_restored_elsewhere
from jaxddp.comparison_test import assert_near, drawn, grid, mostly_full, on_one_device, refusal, trained
from jaxddp.instruments.schedule import read_schedule

pytestmark = pytest.mark.usefixtures("x64")
SPECS = {"layers": [{"up": P(None, "model"), "bias": P("model"), "down": P("model", None)}] * 2, "head": P()}
STRATEGIES = {
    "bucketed": jaxddp.bucketed(0.0005),
    "zero1": jaxddp.zero1(0.0005),
    "zero2": jaxddp.zero2(0.0005),
    "zero3": jaxddp.zero3(min_shard_elements=10),
}
QUICK = (("bucketed", (2, 2)), ("zero2", (2, 4)), ("zero3", (4, 2)))  # by default: every shape
dense = jaxddp.layer(lambda one, x: x + jnp.tanh(x @ one["up"] + one["bias"]) @ one["down"])


def forward(params, x):
    for one in params["layers"]:
        x = dense(one, x)
    return x @ params["head"]


def loss_fn(params, batch):
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def model():
    rng = np.random.default_rng(0)
    shapes = {"up": (7, 8), "bias": (8,), "down": (8, 7)}
    layers = [{name: rng.normal(size=shape) / 3 for name, shape in shapes.items()} for _ in range(2)]
    return {"layers": layers, "head": rng.normal(size=(7, 3))}


def batches(count=4):
    return [drawn(step + 1, x=(16, 7), y=(16, 3)) for step in range(count)]


@functools.cache
def clipped_on_one_device():
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    return on_one_device(loss_fn, model(), batches(), optimizer)


@pytest.mark.parametrize(("name", "shape"), mostly_full(QUICK, itertools.product(STRATEGIES, ((2, 2), (4, 2), (2, 4)))))
def test_training_is_that_of_one_device_and_compiled_as_planned(name, shape):
    params = clipped_on_one_device()
    averaging = optax.chain(optax.adamw(1e-2), jaxddp.params_ema(0.0))  # whose average is the parameters
    trainer = jaxddp.Trainer(
        loss_fn, averaging, STRATEGIES[name], grid(*shape), axis="data", param_specs=SPECS, max_grad_norm=0.5,
        num_microbatches=2,
    )  # fmt: skip
    state, _ = trained(trainer, trainer.init(model()), batches())
    assert_near(trainer.params(state), params)
    jaxddp.check_replicas(trainer, state)
    assert_near(trainer.params(trainer.averaged(state)), params)
    assert_near(trainer.evaluate(state, batches()[0]), jax.jit(loss_fn)(params, batches()[0]))

    num_data, num_model = shape
    trees = state.params, state.opt_state[0][0].mu, state.opt_state[1].ema
    block = 7 * 8 // num_model
    shard = -(-block // num_data)
    held = {"zero1": [block, shard, shard], "zero2": [block, shard, shard], "zero3": [shard] * 3}.get(name, [block] * 3)
    assert [tree["layers"][1]["up"].addressable_shards[0].data.size for tree in trees] == held
    compiled = read_schedule(trainer.compile(state, batches()[0])).gradient_groups()
    assert sorted(trainer.programs(state).planned_groups(state, batches()[0])) == compiled
    assert {group for _, _, group in compiled} == {tuple(range(0, trainer.mesh.size, num_model))}
    if "zero" not in name:
        split = 2 * (7 * 8 + 8 + 8 * 7)
        assert sum(num_bytes for _, num_bytes, _ in compiled) == 8 * (split // num_model + 7 * 3)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("bucketed", optax.contrib.muon(1e-2)), pytest.param("zero3", optax.adamw(1e-2), marks=pytest.mark.full)],
)
def test_what_xla_adds_along_other_axes_is_not_counted_and_the_state_stays_in_place(strategy, optimizer):
    """A bias of features that are split, but which is not split itself, and a state of them."""

    def loss_fn(params, mean, batch):
        hidden = batch["x"] @ params["up"] + params["bias"]
        return jnp.mean((jnp.tanh(hidden - hidden.mean(0)) @ params["down"]) ** 2), 0.9 * mean + 0.1 * hidden.mean(0)

    params = drawn(up=(7, 8), bias=8, down=(8, 6))
    specs = {"up": P(None, "model"), "bias": P(), "down": P(None, "model")}
    trainer = jaxddp.Trainer(
        loss_fn, optimizer, STRATEGIES[strategy], grid(2, 2), param_specs=specs, has_state=True, nonfinite="skip"
    )
    state, batch = trainer.abstract_state(params, np.zeros(8)), batches(1)[0]
    schedule = read_schedule(trainer.compile(state, batch))
    assert sorted(trainer.programs(state).planned_groups(state, batch)) == schedule.gradient_groups()
    found = schedule.collectives()
    synced = [(one.kind, one.num_bytes) for one in found if one.is_model_state]
    assert synced == trainer.programs(state).planned_sync(state)
    assert all(len(one.group) == 2 for one in found)  # those of all devices brought the state back into place


def noisy_loss(params, model_state, batch, key):
    x = batch["x"] * jax.random.bernoulli(key, 0.5, batch["x"].shape)
    squares = jnp.sum((forward(params, x) - batch["y"]) ** 2, axis=1)
    state = {"mean": 0.9 * model_state["mean"] + 0.1 * squares.mean(), "count": model_state["count"] + 1}
    aux = {"mean": squares.mean(), "own": jaxddp.Weighted(squares.sum(), 1.0), "each": jaxddp.PerExample(squares)}
    return jaxddp.Weighted(jnp.sum(squares * batch["mask"]), jnp.sum(batch["mask"])), (state, aux)


NOISY = {
    "bucketed": {"num_microbatches": 2, "state_sync": "first"},
    "bucketed, hook": {},
    "zero1": {"compute_dtype": jnp.float32},
    "zero2": {"trainable": lambda name: "up" not in name},
    "zero3": {"num_microbatches": 2},
}


MESHES = {
    "data": lambda: (jaxddp.data_mesh(4), {}),
    "replicas": lambda: (jaxddp.data_mesh(4, replicas=2), {}),
    "model": lambda: (grid(4, 2), {"param_specs": SPECS}),
    "both": lambda: (
        grid(2, 2, 2, names=("replica", "data", "model")), {"param_specs": SPECS, "axis": ("replica", "data")}
    ),
}  # fmt: skip


@functools.cache
def trained_with_noise(name, mesh_name):
    """Parameters, model state, metrics of the last step and measures of an uneven number of examples."""
    mesh, placed = MESHES[mesh_name]()
    trainer = jaxddp.Trainer(
        noisy_loss, optax.adamw(1e-2), STRATEGIES.get(name, jaxddp.bucketed(hook=jaxddp.hooks.bf16)), mesh,
        has_state=True, has_aux=True, max_grad_norm=0.5, **placed, **NOISY[name],
    )  # fmt: skip
    state = trainer.init(model(), model_state={"mean": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)})
    state, metrics = trained(trainer, state, [batch | {"mask": np.arange(16.0) % 5} for batch in batches(3)])
    measured = trainer.evaluate(
        state, [{"x": np.ones((5, 7))}, {"x": np.zeros((3, 7))}],
        lambda params, model_state, batch: {"each": jaxddp.PerExample(forward(params, batch["x"]).sum(1))},
    )  # fmt: skip
    return trainer.params(state), trainer.model_state(state), metrics, measured


ALONE = (("zero1", "replicas"), ("zero1", "model"), ("zero3", "both"))  # by default: every mesh


@pytest.mark.parametrize(("name", "mesh"), mostly_full(ALONE, itertools.product(NOISY, list(MESHES)[1:])))
def test_keys_states_and_metrics_are_those_of_the_data_ranks_alone(name, mesh):
    """A rank's number counts over the axes of replicas and data."""
    # Sums of float32 or bfloat16 are rounded in another order, and Adam divides by the size of gradients.
    tolerance = {"zero1": 1e-5, "bucketed, hook": 1e-2}.get(name, 1e-12)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(assert_close, trained_with_noise(name, "data"), trained_with_noise(name, mesh))


@pytest.mark.parametrize("name", [pytest.param("bucketed", marks=pytest.mark.full), "zero3"])
def test_checkpoints_are_of_no_mesh(tmp_path, name):
    split = jaxddp.Trainer(loss_fn, optax.adam(1e-2), STRATEGIES[name], grid(2, 4), param_specs=SPECS)
    assert_restored_elsewhere(tmp_path, split, model(), batches())


def test_optimizers_that_are_not_elementwise_see_whole_parameters():
    optimizer = optax.lamb(1e-2)
    trainer = jaxddp.Trainer(loss_fn, optimizer, jaxddp.bucketed(), grid(2, 2), param_specs=SPECS)
    state, _ = trained(trainer, trainer.init(model()), batches())
    assert_near(trainer.params(state), on_one_device(loss_fn, model(), batches(), optimizer))


SPLITS = (P(None, None, "model"), P("model"), P(None, "more", "model"), P(None, ("model", "more")))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_stacks_under_a_scan_may_be_split_along_any_dimension(split):
    def scanned(params, batch):
        x, _ = jax.lax.scan(lambda x, kernel: (unit(kernel, x), None), batch["x"], params["stack"])
        return jnp.mean((x - batch["y"]) ** 2)

    unit = jaxddp.layer(lambda kernel, x: x + jnp.tanh(x @ kernel))
    rng = np.random.default_rng(0)
    params = {"stack": rng.normal(size=(4, 8, 8)) / 3}
    steps = [{"x": rng.normal(size=(8, 8)), "y": rng.normal(size=(8, 8))} for _ in range(2)]
    mesh = grid(2, 2, 2, names=("data", "model", "more"))
    trainer = jaxddp.Trainer(scanned, optax.sgd(0.1), STRATEGIES["zero3"], mesh, param_specs=split)
    state, _ = trained(trainer, trainer.init(params), steps)
    planned = sorted(trainer.programs(state).planned_groups(state, steps[0]))
    over_data = {groups for *_, groups in planned}
    compiled = read_schedule(trainer.compile(state, steps[0])).gradient_groups()
    # What is sent along the other axes is XLA's choice: jax 0.12 sends there, jax 0.10 does not.
    assert planned == [one for one in compiled if one[2] in over_data]
    assert_near(trainer.params(state), on_one_device(scanned, params, steps, optax.sgd(0.1)))


@pytest.mark.full
@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero3"])
def test_on_gpus_that_are_not_here_it_compiles_as_planned(name):
    device = targets.mesh("h100:8").abstract_device
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, abstract_device=device)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-2), STRATEGIES[name], mesh, param_specs=SPECS)
    state, batch = trainer.abstract_state(model()), batches()[0]
    compiled = read_schedule(trainer.compile(state, batch)).gradient_groups()
    assert len(compiled) > 2 and sorted(trainer.programs(state).planned_groups(state, batch)) == compiled


UNLIKE = {"w": P(None, "model"), "x": {"w": P("model")}, "y": {"w": P()}, "mu": {"w": P("model")}}


@pytest.mark.parametrize("specs", [UNLIKE, P(None, "model")])
def test_names_that_end_with_another_parameters_name_and_an_array_without_one(specs):
    params = jax.tree.map(lambda _: np.ones((4, 4)), specs, is_leaf=lambda one: isinstance(one, P))
    trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.flat(), grid(2, 2), param_specs=specs)
    state = trainer.init(params)
    for held in (state.params, *state.opt_state[0][1:]):
        assert jax.tree.map(lambda leaf: leaf.sharding.spec, held) == specs


def test_arrays_put_into_a_state_must_lie_as_those_before():
    trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero1(), grid(2, 2), param_specs=SPECS)
    state, full = trainer.init(model()), model()
    whole = trainer.params(state)  # equal on all devices
    with pytest.raises(ValueError, match="input shardings that disagree"):
        trainer.step(state._replace(params=whole), batches(1)[0])
    placed = jax.device_put(full, jax.tree.map(lambda leaf: leaf.sharding, state.params))
    trainer.step(state._replace(params=placed), batches(1)[0])


def test_bad_input():
    def make(strategy=STRATEGIES["bucketed"], **options):
        return jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, grid(2, 2), **options)

    assert "mesh axes (=('data', 'model')) must be one, or 'replica' and another" in refusal(make)
    assert "param_specs must be given if, and only if, the mesh has axes beside data" in refusal(make, axis="data")
    assert "axis (='dat') must be of the mesh" in refusal(make, axis="dat", param_specs=SPECS)
    leaves = make(jaxddp.zero1(shard="leaves"), param_specs=SPECS)
    assert "shard (='leaves') must be 'elements' with param_specs" in refusal(leaves.init, model())
    for specs, message in (
        (SPECS | {"head": P("data")}, "must be a PartitionSpec over model"),
        (SPECS | {"head": P("model")}, "must divide its shape [7, 3]"),
        (SPECS | {"head": P(None, None, "model")}, "must divide its shape [7, 3]"),
        (SPECS | {"head": P("model", "model")}, "must divide its shape [7, 3]"),
    ):
        assert message in refusal(make(param_specs=specs).init, model())
    with pytest.raises(ValueError, match="tree"):
        make(param_specs={"head": P()}).init(model())
