"""What each strategy compiles to on CPU, in the trainer, in a user's own shard_map and in pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxddp
from jaxddp import compression
from jaxddp.buckets import MIB
from jaxddp.models import build
from jaxddp.order import finishing_times
from jaxddp.schedule import read_program
from jaxddp.strategy import planned_collectives
from jaxddp.tree import tensor_specs

NUM_RANKS = 4
STRATEGIES = {
    "naive": jaxddp.naive(),
    "flat": jaxddp.flat(),
    "overlapped": jaxddp.overlapped(),
    "bucketed": jaxddp.bucketed(0.005),
    "bucketed, caps": jaxddp.bucketed([0.002, 0.01]),
}
strategies = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


@pytest.fixture(scope="module")
def model():
    loss_fn, params = build("tiny")
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17), dtype=np.int32)
    return loss_fn, params, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def positions(compiled):
    """Where the gradients' collectives stand, and where the backward ends."""
    program = read_program(compiled)
    return [c.position for c in program.collectives() if not c.is_metrics], program.last_backward()


def assert_holds_what_was_planned(strategy, compiled, planned):
    assert jaxddp.gradient_collectives(compiled) == sorted(planned)
    where, last_backward = positions(compiled)
    assert last_backward > 0
    if strategy.name in ("naive", "flat"):
        assert min(where) > last_backward
    else:
        assert min(where) < last_backward


@strategies
def test_the_trainers_program_is_the_plan(model, strategy):
    loss_fn, params, batch = model
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, jaxddp.data_mesh(NUM_RANKS))
    state = trainer.init(params)
    planned = trainer.planned(state, batch)
    total = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    assert sum(num_bytes for _, num_bytes in planned) == total
    expected = {"naive": 21, "flat": 1, "overlapped": 21}.get(strategy.name)
    assert len(planned) == expected if expected else 3 < len(planned) < 21
    assert_holds_what_was_planned(strategy, trainer.compile(state, batch), planned)


def test_the_combiner_let_loose_would_break_the_plan(model):
    """Guards the tests above: without the options XLA makes every strategy the same program."""
    loss_fn, params, batch = model
    for strategy in (STRATEGIES["naive"], STRATEGIES["bucketed"]):
        run, plan, args = own_shard_map(loss_fn, params, batch, strategy)
        merged = jax.jit(run).lower(*args).compile()
        assert [kind for kind, _ in jaxddp.gradient_collectives(merged)] == ["all-reduce"]
        assert len(planned_collectives(strategy, plan, NUM_RANKS)) > 1


def gradients_and_plan(loss_fn, params, batch, strategy):
    traced, grads = jax.make_jaxpr(jax.grad(loss_fn), return_shape=True)(params, batch)
    specs = tensor_specs(jaxddp.named_leaves(grads)).values()
    ready = sorted(zip(finishing_times(traced), specs, strict=True), key=lambda item: item[0])
    return strategy.plan([spec for _, spec in ready])


def own_shard_map(loss_fn, params, batch, strategy, check_vma=True):
    rank_batch = jax.tree.map(lambda leaf: leaf[: len(leaf) // NUM_RANKS], batch)
    plan = gradients_and_plan(loss_fn, params, rank_batch, strategy)

    def mean_gradients(params, batch):
        local = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
        grads = jax.grad(loss_fn)(local, batch)
        return jaxddp.sync_gradients(grads, plan, "data", compression=strategy.compression)

    mesh = jaxddp.data_mesh(NUM_RANKS)
    in_specs = (PartitionSpec(), PartitionSpec("data"))
    run = jax.shard_map(mean_gradients, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(), check_vma=check_vma)
    return run, plan, (params, batch)


def assert_is_full_batch_gradient(model, grads):
    loss_fn, params, batch = model
    # Sums in another order: a few units in the last place of gradients of order 0.1.
    jax.tree.map(
        lambda ours, full: np.testing.assert_allclose(ours, full, atol=2e-7),
        grads,
        jax.jit(jax.grad(loss_fn))(params, batch),
    )


@strategies
@pytest.mark.parametrize("check_vma", [True, False])
def test_sync_gradients_in_a_users_own_shard_map(model, strategy, check_vma):
    run, plan, args = own_shard_map(*model, strategy, check_vma=check_vma)
    compiled = jax.jit(run).lower(*args).compile(jaxddp.compile_options(strategy, "cpu"))
    assert_holds_what_was_planned(strategy, compiled, planned_collectives(strategy, plan, NUM_RANKS))
    mesh = jaxddp.data_mesh(NUM_RANKS)
    replicated, by_rank = (jax.NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    assert_is_full_batch_gradient(
        model, compiled(jax.device_put(args[0], replicated), jax.device_put(args[1], by_rank))
    )


@strategies
def test_sync_gradients_in_pmap(model, strategy):
    loss_fn, params, batch = model
    by_rank = jax.tree.map(lambda leaf: leaf.reshape(NUM_RANKS, -1, *leaf.shape[1:]), batch)
    plan = gradients_and_plan(loss_fn, params, jax.tree.map(lambda leaf: leaf[0], by_rank), strategy)

    def mean_gradients(params, batch):
        return jaxddp.sync_gradients(jax.grad(loss_fn)(params, batch), plan, "data")

    run = jax.pmap(mean_gradients, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:NUM_RANKS])
    compiled = run.lower(params, by_rank).compile(jaxddp.compile_options(strategy, "cpu"))
    assert_holds_what_was_planned(strategy, compiled, planned_collectives(strategy, plan, NUM_RANKS))
    stacked = compiled(params, by_rank)
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape)), stacked)
    assert_is_full_batch_gradient(model, jax.tree.map(lambda leaf: leaf[0], stacked))


@strategies
def test_integer_gradients_sum_bit_for_bit(strategy):
    """Small integers add exactly in any order, so the sum must equal NumPy's to the bit."""
    grads = {
        f"p{i}": np.random.default_rng(i).integers(-8, 8, (NUM_RANKS, 37 + i)).astype(np.float32) for i in range(9)
    }
    plan = strategy.plan(tensor_specs({name: value[0] for name, value in grads.items()}).values())
    run = jax.shard_map(
        lambda tree: jaxddp.sync_gradients(jax.tree.map(lambda leaf: leaf[0], tree), plan, "data", denominator=1),
        mesh=jaxddp.data_mesh(NUM_RANKS), in_specs=PartitionSpec("data"), out_specs=PartitionSpec(),
    )  # fmt: skip
    for name, total in jax.jit(run, compiler_options=jaxddp.compile_options(strategy, "cpu"))(grads).items():
        np.testing.assert_array_equal(total, grads[name].sum(0))


def test_what_the_plan_leaves_out_is_equal_on_all_ranks_and_not_sent():
    plan = jaxddp.plan_buckets([jaxddp.TensorSpec("sent", (2,), "float32")])
    run = jax.jit(jax.shard_map(
        lambda x: jaxddp.sync_gradients({"constant": jnp.full(3, 5.0), "sent": x[0]}, plan, "data"),
        mesh=jaxddp.data_mesh(NUM_RANKS), in_specs=PartitionSpec("data"), out_specs=PartitionSpec(),
    ))  # fmt: skip
    x = jnp.arange(8.0).reshape(NUM_RANKS, 2)
    means = run(x)
    np.testing.assert_array_equal(means["constant"], np.full(3, 5.0))
    np.testing.assert_array_equal(means["sent"], x.mean(0))
    assert jaxddp.gradient_collectives(run.lower(x).compile()) == [("all-reduce", 8)]


def test_noop_sends_nothing_and_packs_all_the_same(model):
    loss_fn, params, batch = model
    strategy = jaxddp.bucketed(0.005, compression=compression.noop)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(NUM_RANKS))
    state = trainer.init(params)
    assert trainer.planned(state, batch) == jaxddp.gradient_collectives(trainer.compile(state, batch)) == []
    assert "concatenate" in trainer.compile(state, batch).as_text()


def test_one_rank_communicates_nothing(model):
    loss_fn, params, batch = model
    for strategy in STRATEGIES.values():
        trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(1))
        state = trainer.init(params)
        assert trainer.plan(state, batch).buckets == ()
        assert "all-reduce" not in trainer.compile(state, batch).as_text()


def test_the_registry_and_bad_names():
    assert list(jaxddp.STRATEGIES) == ["naive", "flat", "overlapped", "bucketed"]
    assert (
        jaxddp.make_strategy("bucketed", bucket_mb=1).plan([jaxddp.TensorSpec("a", (MIB,), "float32")]).num_bytes
        == 4 * MIB
    )
    with pytest.raises(ValueError, match="unknown strategy 'zero9': one of .*naive"):
        jaxddp.make_strategy("zero9")
    with pytest.raises(ValueError, match=r"bucket_mb \(=0\) must be a positive number"):
        jaxddp.bucketed(0)


def test_a_plan_of_another_model_is_refused():
    plan = jaxddp.plan_buckets([jaxddp.TensorSpec("b", (2,), "float32")])
    with pytest.raises(ValueError, match="plan names 'b', which grads does not hold"):
        jaxddp.sync_gradients({"a": jnp.ones(2)}, plan, "data")
