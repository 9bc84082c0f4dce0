"""Meshes with replicas: shards within a group of ranks, sums across the groups, and the training of one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.checkpoints_test import assert_restored_elsewhere
from jaxddp.comparison_test import assert_near, compiled_as_planned, grid, mostly_full, on_one_device, refusal, trained
from jaxddp.instruments.schedule import read_schedule
from jaxddp.training.param_specs_test import batches
from jaxddp.training.replicas_test import flip

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"2x2": (4, 2), "2x4": (8, 2), "4x2": (8, 4)}
STRATEGIES = {
    **{name: factory() for name, factory in jaxddp.STRATEGIES.items()},
    "zero1": jaxddp.zero1(0.0005),  # several buckets
    "zero2 by leaves": jaxddp.zero2(0.0005, shard="leaves"),
    "zero3": jaxddp.zero3(min_shard_elements=10),
}
QUICK = (("naive", "2x2"), ("zero1", "2x4"), ("zero3", "4x2"))  # by default: one of each stage and shape
dense = jaxddp.layer(lambda params, x: jnp.tanh(x @ params["kernel"] + params["bias"]))


def loss_fn(params, batch):
    x = batch["x"]
    for one in params["layers"]:
        x = dense(one, x)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def model():
    rng = np.random.default_rng(0)
    layers = [{"kernel": rng.normal(size=(7, 7)) / 3, "bias": rng.normal(size=7)} for _ in range(3)]
    return {"layers": layers, "head": rng.normal(size=(7, 3))}


@pytest.mark.parametrize(("name", "shape"), mostly_full(QUICK, itertools.product(STRATEGIES, SHAPES)))
def test_training_is_that_of_one_device_and_compiled_as_planned(name, shape):
    num_ranks, replicas = SHAPES[shape]
    optimizer = optax.adamw(1e-2)
    params = on_one_device(loss_fn, model(), batches(), optax.chain(optax.clip_by_global_norm(0.5), optimizer))
    mesh = jaxddp.data_mesh(num_ranks, replicas=replicas)
    trainer = jaxddp.Trainer(loss_fn, optimizer, STRATEGIES[name], mesh, max_grad_norm=0.5, num_microbatches=2)
    state, _ = trained(trainer, trainer.init(model()), batches()[:-1])
    last, before = batches()[-1], trainer.params(state)
    state, metrics = trainer.step(state, last)
    assert_near(metrics["grad_norm"], optax.tree.norm(jax.jit(jax.grad(loss_fn))(before, last)))
    jaxddp.check_replicas(trainer, state)
    assert_near(trainer.params(state), params)
    assert_near(trainer.evaluate(state, batches()[0]), jax.jit(loss_fn)(params, batches()[0]))

    compiled = read_schedule(trainer.compile(state, batches()[0])).gradient_groups()
    assert sorted(trainer.programs(state).planned_groups(state, batches()[0])) == compiled
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


def test_checkpoints_are_of_no_mesh(tmp_path):
    hybrid = jaxddp.Trainer(loss_fn, optax.adam(1e-2), STRATEGIES["zero3"], jaxddp.data_mesh(8, replicas=2))
    assert_restored_elsewhere(tmp_path, hybrid, model(), batches())


@pytest.mark.parametrize(("name", "sizes"), [("zero2 by leaves", (1, 2)), ("zero3", (2, 1))])
def test_no_collective_is_planned_along_an_axis_of_one_device(name, sizes):
    mesh = grid(*sizes, names=("replica", "data"))
    trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), STRATEGIES[name], mesh)
    assert compiled_as_planned(trainer, trainer.init(model()), batches()[0])


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_axes_of_ranks_in_another_order_than_the_mesh_has_them(name):
    found = []
    for mesh in (jaxddp.data_mesh(4), grid(2, 2, names=("data", "replica"))):
        axis = mesh.axis_names[::-1]
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), STRATEGIES[name], mesh, axis=axis)
        state, _ = trained(trainer, trainer.init(model()), batches())
        found.append(trainer.params(state))
    assert_near(*found)


def test_a_shard_that_differs_from_its_replica_is_found():
    trainer = jaxddp.Trainer(loss_fn, optax.adam(1e-2), STRATEGIES["zero3"], jaxddp.data_mesh(8, replicas=4))
    state = trainer.init(model())
    head = state.params["head"]
    head = flip(head, 5, 0)  # rank 5 is the second of its group, as ranks 1, 3 and 7 are of theirs
    with pytest.raises(jaxddp.ReplicaError, match=r"^params\.head of rank 5 differs "):
        jaxddp.check_replicas(trainer, state._replace(params=state.params | {"head": head}))


def test_bad_input():
    for replicas in (3, 8):
        assert f"replicas (={replicas}) must divide num_ranks (=8)" in refusal(jaxddp.data_mesh, 8, replicas=replicas)
    assert "replicas (=0) must be a positive integer" in refusal(jaxddp.data_mesh, 8, replicas=0)
    assert "axis (='replica')" in refusal(jaxddp.data_mesh, 8, axis="replica", replicas=2)
