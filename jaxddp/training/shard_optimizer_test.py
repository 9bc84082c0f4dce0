"""The wrapped optimizer in loops of one's own: the same weights as plain optax, and 1/N of the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxddp
from jaxddp.comparison_test import NUM_EMPTY, assert_near, drawn, on_one_device, refusal
from jaxddp.models.toy_test import build

NUM_RANKS = 4
NUM_STEPS = 5


def decays(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS = {
    "adamw, masked, by schedule": optax.adamw(optax.linear_schedule(1e-2, 1e-3, 9), weight_decay=0.1, mask=decays),
    "plateau at every step": optax.chain(
        optax.sgd(0.1, momentum=0.9), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, rtol=1.0)
    ),
    "momentum with injected rate": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
}


@pytest.fixture
def problem(x64):
    loss_fn, params = build("toy_unused")
    batches = [drawn(step, x=(8, 10), y=(8, 5)) for step in range(NUM_STEPS)]
    return loss_fn, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params), batches


def step_on_rank(loss_fn, optimizer):
    def step(params, state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, state = optax.with_extra_args_support(optimizer).update(grads, state, params, value=jnp.ones(()))
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize(("name", "bucket_mb"), list(zip(OPTIMIZERS, (25, 25, 0.0005), strict=True)))
def test_in_a_users_own_shard_map(problem, name, bucket_mb):
    optimizer, (loss_fn, params, batches) = OPTIMIZERS[name], problem
    mesh = jaxddp.data_mesh(NUM_RANKS)
    sharded = jaxddp.shard_optimizer(optimizer, "data", bucket_mb=bucket_mb, max_grad_norm=0.05)
    specs = jaxddp.sharded_specs(optimizer, params, num_ranks=NUM_RANKS, axis="data")
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

    specs = {"in_specs": (whole, specs, PartitionSpec("data")), "out_specs": (whole, specs)}
    step = jax.shard_map(step_on_rank(loss_fn, sharded), mesh=mesh, check_vma=False, **specs)
    step = jax.jit(step, compiler_options=jaxddp.compile_options(jaxddp.zero1(), "cpu"))
    ours = params
    for batch in batches:
        ours, state = step(ours, state, batch)
    clipped = optax.chain(optax.clip_by_global_norm(0.05), optimizer)
    assert_near(ours, on_one_device(loss_fn, params, batches, clipped), atol=1e-13)
    compiled = step.lower(ours, state, batch).compile()
    kinds = [kind for kind, _ in jaxddp.gradient_collectives(compiled)]
    assert kinds.count("reduce-scatter") == kinds.count("all-gather") == (1 if bucket_mb == 25 else 4)
    assert len(kinds) == 2 * kinds.count("all-gather")


def test_in_pmap(problem):
    loss_fn, params, batches = problem
    optimizer = OPTIMIZERS["adamw, masked, by schedule"]
    sharded = jaxddp.shard_optimizer(optimizer, "ranks")
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_RANKS), params)
    devices = jax.devices()[:NUM_RANKS]
    state = jax.pmap(sharded.init, axis_name="ranks", devices=devices)(copies)
    step = jax.pmap(step_on_rank(loss_fn, sharded), axis_name="ranks", devices=devices)
    for batch in batches:
        copies, state = step(copies, state, {name: leaf.reshape(NUM_RANKS, 2, -1) for name, leaf in batch.items()})
    theirs = on_one_device(loss_fn, params, batches, optimizer)
    assert_near(copies, jax.tree.map(lambda leaf: np.broadcast_to(leaf, (NUM_RANKS, *leaf.shape)), theirs), atol=1e-13)


@pytest.mark.parametrize(("check_vma", "num_ranks"), [(True, NUM_RANKS), (False, NUM_RANKS), (True, 1)])
def test_leaves_smaller_than_the_ranks_empty_scalar_and_unused(check_vma, num_ranks):
    mesh, optimizer = jaxddp.data_mesh(num_ranks), optax.adam(0.1)
    empty = {} if NUM_EMPTY else {"empty": jnp.zeros((0, 3))}
    params = {"scalar": jnp.float32(1), "two": jnp.ones(2), "nine": jnp.ones((3, 3)), "unused": jnp.ones(5), **empty}
    sharded = jaxddp.shard_optimizer(optimizer, "data")

    def step(params, x):
        def loss_fn(params):
            return sum(jnp.sum(leaf**2) for name, leaf in params.items() if name != "unused") * x[0] / 2

        grads = jax.grad(loss_fn)(jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params))
        updates, _ = sharded.update(grads, sharded.init(params), params)
        return updates

    x = np.arange(1, 1 + num_ranks, dtype=np.float32)
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    ours = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))(params, x)
    grads = jax.tree.map(lambda leaf: leaf * x.mean(), params) | {"unused": jnp.zeros(5)}
    theirs, _ = optimizer.update(grads, optimizer.init(params), params)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)  # float32, a few roundings
        assert mine.shape == other.shape


def test_what_is_not_element_wise_is_refused_where_it_would_be_sharded():
    mesh, params, optimizer = jaxddp.data_mesh(2), {"w": jnp.ones((8, 8))}, optax.lamb(0.1)
    init = jaxddp.shard_optimizer(optimizer, "data").init
    init = jax.shard_map(init, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    for found in (refusal(jaxddp.sharded_specs, optimizer, params, num_ranks=2, axis="data"), refusal(init, params)):
        assert "must be element-wise to be sharded" in found
