"""Replicas that differ between ranks are found, whatever holds them; replicas of sound training are not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.training.replicas import _checksum

NUM_RANKS = 4
STRATEGIES = {"bucketed": jaxddp.bucketed(), "zero1": jaxddp.zero1(), "zero3": jaxddp.zero3(min_shard_elements=0)}


def loss_fn(params, model_state, batch):
    hidden = jnp.tanh(batch @ params["up"])
    return jnp.mean((hidden @ params["down"]) ** 2), {"mean": 0.9 * model_state["mean"] + hidden.mean(0)}


def train(strategy):
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(0.1), strategy, jaxddp.data_mesh(NUM_RANKS), has_state=True)
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(3, 7)).astype("f"), "down": rng.normal(size=(7, 1)).astype("f")}
    state = trainer.init(params, model_state={"mean": jnp.zeros(7)})
    state, _ = trainer.step(state, rng.normal(size=(8, 3)).astype("f"))
    return trainer, state


def on_rank(leaf, rank, change):
    """An array of which one rank's copy or shard is changed."""
    shards = [np.array(shard.data) for shard in leaf.addressable_shards]
    shards[rank] = change(shards[rank])
    arrays = [jax.device_put(data, shard.device) for data, shard in zip(shards, leaf.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def flip(leaf, rank, bit, element=0):
    def change(shard):
        shard.reshape(-1).view(np.uint32)[element] ^= np.uint32(1) << bit
        return shard

    return on_rank(leaf, rank, change)


@pytest.mark.sample
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_is_found_in_whatever_every_rank_holds(name, bit):
    trainer, state = train(STRATEGIES[name])
    with jax.set_mesh(trainer.mesh):
        jaxddp.check_replicas(trainer, state)
    jaxddp.check_replicas(trainer, state._replace(step=jnp.int32(1)))  # as users set a learning rate, on one device
    leaves, structure = jax.tree.flatten(state)
    for place, path in enumerate(jaxddp.named_leaves(state)):
        if path == "key":  # its numbers cannot be reached here
            continue
        changed = [flip(leaf, 2, bit) if at == place else leaf for at, leaf in enumerate(leaves)]
        if not leaves[place].is_fully_replicated:
            jaxddp.check_replicas(trainer, jax.tree.unflatten(structure, changed))  # a shard has no replica
            continue
        with pytest.raises(jaxddp.ReplicaError, match=rf"^{path} of rank 2 differs .* after step 1: "):
            jaxddp.check_replicas(trainer, jax.tree.unflatten(structure, changed))


@pytest.mark.parametrize("bit", [30, 31, None])
def test_the_same_bit_of_several_elements_and_a_change_of_places_are_found(bit):
    trainer, state = train(jaxddp.naive())
    weights = state.params["up"]
    for element in (3, 8, 11, 20):
        weights = on_rank(weights, 2, lambda copy: np.roll(copy, 1)) if bit is None else flip(weights, 2, bit, element)
    with pytest.raises(jaxddp.ReplicaError, match=r"^params\.up of rank 2 "):
        jaxddp.check_replicas(trainer, state._replace(params=state.params | {"up": weights}))


def test_wide_and_narrow_leaves_are_compared_by_all_their_bits():
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64, np.float16, np.int8, np.bool_, np.complex64):
            array = np.zeros(5, dtype)
            before = int(_checksum(jnp.asarray(array)))
            for byte in range(array.dtype.itemsize if dtype is not np.bool_ else 1):
                changed = array.copy()
                changed.view(np.uint8)[3 * array.dtype.itemsize + byte] ^= 1
                assert int(_checksum(jnp.asarray(changed))) != before, (dtype, byte)
    assert int(_checksum(jax.random.key(1))) != int(_checksum(jax.random.key(2)))


@pytest.mark.parametrize("sizes", [{"data": 3, "model": 2}, {"model": 2, "data": 3}], ids="-".join)
def test_every_device_of_a_mesh_with_other_axes_is_compared(sizes):
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))  # of explicit axes, as JAX makes them
    specs = {"up": jax.P(None, "model"), "down": jax.P("model")}

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), mesh, axis="data", param_specs=specs)
    state = trainer.init({"up": np.ones((3, 6), np.float32), "down": np.ones((6, 1), np.float32)})
    jaxddp.check_replicas(trainer, state)
    for rank in range(mesh.size):
        changed = state._replace(params=state.params | {"up": flip(state.params["up"], rank, 3)})
        with pytest.raises(jaxddp.ReplicaError, match=rf"^params\.up of rank {rank} differs"):
            jaxddp.check_replicas(trainer, changed)
