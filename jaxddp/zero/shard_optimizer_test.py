"""The wrapped optimizer in loops of one's own: the same weights as plain optax, and 1/N of the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxddp
from jaxddp.models import build

NUM_RANKS = 4
NUM_STEPS = 5


def decays(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS = {
    "adamw, masked, by schedule": lambda clip: optax.chain(
        clip(0.05), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 9), weight_decay=0.1, mask=decays)
    ),
    "momentum with injected rate": lambda clip: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
}


@pytest.fixture
def problem():
    with jax.enable_x64(True):
        loss_fn, params = build("toy_unused")
        rng = np.random.default_rng(0)
        batch = {"x": rng.normal(size=(NUM_STEPS, 8, 10)), "y": rng.normal(size=(NUM_STEPS, 8, 5))}
        yield loss_fn, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params), batch


def plain(loss_fn, optimizer, params, batch):
    state, step = optimizer.init(params), jax.jit(step_on_rank(loss_fn, optimizer))
    for index in range(NUM_STEPS):
        params, state = step(params, state, jax.tree.map(lambda leaf: leaf[index], batch))  # noqa: B023
    return params


def step_on_rank(loss_fn, optimizer):
    def step(params, state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def assert_same(ours, theirs):
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        # float64: the order of sums, some units in the last place of weights of order 1.
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("name", "bucket_mb"), list(zip(OPTIMIZERS, (25, 0.0005), strict=True)))
def test_in_a_users_own_shard_map(problem, name, bucket_mb):
    optimizer, (loss_fn, params, batch) = OPTIMIZERS[name], problem
    mesh = jaxddp.data_mesh(NUM_RANKS)
    sharded = jaxddp.shard_optimizer(optimizer(jaxddp.clip_by_global_norm), "data", bucket_mb=bucket_mb)
    specs = jaxddp.sharded_specs(optimizer(jaxddp.clip_by_global_norm), params, num_ranks=NUM_RANKS, axis="data")
    whole = PartitionSpec()
    init = jax.shard_map(sharded.init, mesh=mesh, in_specs=whole, out_specs=specs, check_vma=False)
    state = jax.jit(init)(params)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        held = leaf.addressable_shards[0].data.size
        assert held == (leaf.size if spec == whole else leaf.size // NUM_RANKS)
    moments = [leaf for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True) if spec != whole]
    per_rank = sum(leaf.addressable_shards[0].data.size for leaf in moments)
    num_moments = len(moments) // len(jax.tree.leaves(params))
    # A quarter, and less than one element of padding for each leaf.
    assert 0 <= per_rank - num_moments * total / NUM_RANKS < len(moments)

    step = jax.shard_map(
        step_on_rank(loss_fn, sharded),
        mesh=mesh,
        in_specs=(whole, specs, PartitionSpec("data")),
        out_specs=(whole, specs),
        check_vma=False,
    )
    step = jax.jit(step, compiler_options=jaxddp.compile_options(jaxddp.zero1(), "cpu"))
    ours = params
    for index in range(NUM_STEPS):
        ours, state = step(ours, state, jax.tree.map(lambda leaf: leaf[index], batch))  # noqa: B023
    assert_same(ours, plain(loss_fn, optimizer(optax.clip_by_global_norm), params, batch))
    compiled = step.lower(ours, state, jax.tree.map(lambda leaf: leaf[0], batch)).compile()
    kinds = [kind for kind, _ in jaxddp.gradient_collectives(compiled)]
    assert kinds.count("reduce-scatter") == kinds.count("all-gather") == (1 if bucket_mb == 25 else 4)
    assert len(kinds) == 2 * kinds.count("all-gather")


def test_in_pmap(problem):
    loss_fn, params, batch = problem
    optimizer = OPTIMIZERS["adamw, masked, by schedule"]
    sharded = jaxddp.shard_optimizer(optimizer(jaxddp.clip_by_global_norm), "ranks")
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_RANKS), params)
    devices = jax.devices()[:NUM_RANKS]
    state = jax.pmap(sharded.init, axis_name="ranks", devices=devices)(copies)
    step = jax.pmap(step_on_rank(loss_fn, sharded), axis_name="ranks", devices=devices)
    for index in range(NUM_STEPS):
        rows = jax.tree.map(lambda leaf: leaf[index].reshape(NUM_RANKS, -1, leaf.shape[-1]), batch)  # noqa: B023
        copies, state = step(copies, state, rows)
    theirs = plain(loss_fn, optimizer(optax.clip_by_global_norm), params, batch)
    for rank in range(NUM_RANKS):
        assert_same(jax.tree.map(lambda leaf: leaf[rank], copies), theirs)  # noqa: B023


def test_outside_of_a_map_over_the_axis():
    optimizer = jaxddp.shard_optimizer(optax.sgd(0.1), "data")
    for call in (lambda: optimizer.init(jnp.ones(3)), lambda: optimizer.update(jnp.ones(3), optax.EmptyState())):
        with pytest.raises(
            ValueError, match=r"^axis \(='data'\) must be bound: call this inside jax.shard_map over it$"
        ):
            call()


@pytest.mark.parametrize("check_vma", [True, False])
def test_leaves_smaller_than_the_ranks_empty_and_scalar(check_vma):
    mesh, optimizer = jaxddp.data_mesh(NUM_RANKS), optax.adam(0.1)
    # The compiler of jax 0.11 crashes on an array without elements in a shard_map; 0.10 and 0.12 do not.
    empty = {} if jax.__version__.startswith("0.11.") else {"empty": jnp.zeros((0, 3))}
    params = {"scalar": jnp.float32(1), "two": jnp.ones(2), "nine": jnp.ones((3, 3)), **empty}
    sharded = jaxddp.shard_optimizer(optimizer, "data")

    def step(params, x):
        grads = jax.tree.map(lambda leaf: leaf * x[0], params)
        updates, _ = sharded.update(grads, sharded.init(params), params)
        return updates

    x = np.arange(4, dtype=np.float32)
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    ours = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))(params, x)
    grads = jax.tree.map(lambda leaf: leaf * x.mean(), params)
    theirs, _ = optimizer.update(grads, optimizer.init(params), params)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)  # float32, a few roundings
        assert mine.shape == other.shape


@pytest.mark.parametrize(
    "optimizer",
    [optax.lamb(0.1), optax.adafactor(0.1), optax.contrib.muon(0.1)],
    ids=["lamb", "adafactor", "muon"],
)
def test_what_is_not_element_wise_is_refused_where_it_would_be_sharded(optimizer):
    params = {"w": jnp.ones((8, 8))}
    mesh = jaxddp.data_mesh(2)
    with pytest.raises(ValueError, match="must be element-wise to be sharded"):
        jaxddp.sharded_specs(optimizer, params, num_ranks=2, axis="data")
    with pytest.raises(ValueError, match="must be element-wise to be sharded"):
        jaxddp.Trainer(lambda params, batch: jnp.sum(params["w"]), optimizer, jaxddp.zero1(), mesh).init(params)
    with pytest.raises(ValueError, match="must be element-wise to be sharded"):
        sharded = jaxddp.shard_optimizer(optimizer, "data")
        jax.shard_map(sharded.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(
            jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        )
