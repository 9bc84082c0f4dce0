"""What each strategy compiles to on CPU, in the trainer, in a user's own shard_map and in pmap."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxddp
from jaxddp.comparison_test import assert_near, compiled_as_planned, mostly_full, planned_collectives, refusal
from jaxddp.instruments.schedule import read_schedule
from jaxddp.strategy import without_communication

NUM_RANKS = 4
STRATEGIES = {
    "naive": jaxddp.naive(),
    "flat": jaxddp.flat(),
    "overlapped": jaxddp.overlapped(),
    "bucketed": jaxddp.bucketed(0.005),
    "bucketed, caps": jaxddp.bucketed([0.002, 0.01]),
}
strategies = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def quick_for(*names):
    """The strategies, all but the named ones behind the mark ``full``."""
    chosen = [STRATEGIES[name] for name in names]
    return pytest.mark.parametrize("strategy", mostly_full(chosen, STRATEGIES.values()), ids=STRATEGIES)


def assert_holds_what_was_planned(strategy, compiled, planned):
    """The same collectives, and where they were asked for: all after the backward, or most of them within it."""
    schedule = read_schedule(compiled)
    assert schedule.gradient_collectives() == sorted(planned)
    overlap = schedule.overlap()
    assert any(operation.phase == "backward" for operation in schedule.operations)
    if strategy.name in ("naive", "flat"):
        assert overlap.bytes_started_after_backward == overlap.num_bytes
    else:
        # Seen: at most half of the bytes; the gradients that are ready last cannot but come after.
        assert overlap.bytes_started_after_backward <= overlap.num_bytes / 2


@pytest.mark.parametrize(
    "strategy",
    [
        *(jaxddp.make_strategy(name) for name in jaxddp.STRATEGIES),
        jaxddp.bucketed([1, 2], hook=jaxddp.hooks.bf16),
        jaxddp.zero2(shard="leaves"),
        jaxddp.zero3(min_shard_elements=0),
    ],
)
def test_a_strategy_can_be_sent_to_another_process(strategy):
    tensors = [jaxddp.TensorSpec(name, (1 << 19,), "float32") for name in "abc"]
    assert pickle.loads(pickle.dumps(strategy)).plan(tensors) == strategy.plan(tensors)


@pytest.mark.parametrize("num_microbatches", [1, pytest.param(2, marks=pytest.mark.full)])
@quick_for("naive", "overlapped", "bucketed")
def test_the_trainers_program_is_the_plan(model, strategy, num_microbatches):
    loss_fn, params, batch = model
    mesh = jaxddp.data_mesh(NUM_RANKS)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, mesh, num_microbatches=num_microbatches)
    state = trainer.init(params)
    planned = trainer.planned(state, batch)
    total = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    assert sum(num_bytes for _, num_bytes in planned) == total
    expected = {"naive": 21, "flat": 1, "overlapped": 21}.get(strategy.name)
    assert len(planned) == expected if expected else 3 < len(planned) < 21
    assert_holds_what_was_planned(strategy, trainer.compile(state, batch), planned)


def test_without_the_options_xla_sends_all_at_once(model):
    """Guards the tests here: every strategy would be the same program."""
    loss_fn, params, batch = model
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), STRATEGIES["bucketed"], jaxddp.data_mesh(NUM_RANKS))
    state = trainer.init(params)
    function, args, options = trainer.programs(state).step_function(state, batch)
    merged = jax.jit(function, **options | {"compiler_options": {}}).lower(*args).compile()
    assert [kind for kind, _ in jaxddp.gradient_collectives(merged)] == ["all-reduce"]
    assert len(trainer.planned(state, batch)) > 1


@strategies
def test_equal_gradients_are_still_sent_apart(strategy):
    """XLA can prove that parallel branches of one input have equal gradients, and would reduce them once."""

    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"] + x @ params["v"] + params["c"]) ** 2)

    params = {"w": jnp.ones((8, 16)), "v": jnp.ones((8, 16)), "b": jnp.ones(16), "c": jnp.ones(16)}
    if strategy.name == "bucketed":
        strategy = jaxddp.bucketed(1e-5)  # a bucket for each parameter
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(NUM_RANKS))
    state, x = trainer.init(params), np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    assert len(compiled_as_planned(trainer, state, x)) == (1 if strategy.name == "flat" else 4)


@quick_for("flat")
def test_sync_gradients_in_pmap(model, strategy):
    loss_fn, params, batch = model
    by_rank = jax.tree.map(lambda leaf: leaf.reshape(NUM_RANKS, -1, *leaf.shape[1:]), batch)
    rank_batch = jax.tree.map(lambda leaf: leaf[0], by_rank)
    plan = jaxddp.plan_gradients(strategy, jax.grad(loss_fn), params, rank_batch)

    def mean_gradients(params, batch):
        return jaxddp.sync_gradients(jax.grad(loss_fn)(params, batch), plan, "data")

    run = jax.pmap(mean_gradients, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:NUM_RANKS])
    compiled = run.lower(params, by_rank).compile(jaxddp.compile_options(strategy, "cpu"))
    assert_holds_what_was_planned(strategy, compiled, planned_collectives(strategy, plan, NUM_RANKS))
    stacked = compiled(params, by_rank)
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape)), stacked)
    # Sums in another order: a few units in the last place of gradients of order 0.1.
    assert_near(jax.tree.map(lambda leaf: leaf[0], stacked), jax.jit(jax.grad(loss_fn))(params, batch), atol=2e-7)


def test_what_the_plan_leaves_out_is_equal_on_all_ranks_and_not_sent():
    plan = jaxddp.plan_buckets([jaxddp.TensorSpec("sent", (2,), "float32")])
    plan = dataclasses.replace(plan, constants=("constant",))
    constant = jnp.full(3, 5.0)
    run = jax.jit(jax.shard_map(
        lambda x: jaxddp.sync_gradients(
            {"constant": jax.lax.pcast(constant, "data", to="varying"), "sent": x[0]}, plan, "data"
        ),
        mesh=jaxddp.data_mesh(NUM_RANKS), in_specs=PartitionSpec("data"), out_specs=PartitionSpec(),
    ))  # fmt: skip
    x = jnp.arange(8.0).reshape(NUM_RANKS, 2)
    means = run(x)
    np.testing.assert_array_equal(means["constant"], np.full(3, 5.0))
    np.testing.assert_array_equal(means["sent"], x.mean(0))
    assert jaxddp.gradient_collectives(run.lower(x).compile()) == [("all-reduce", 8)]


def test_without_communication_buckets_are_packed_all_the_same(model):
    loss_fn, params, batch = model
    strategy = without_communication(jaxddp.bucketed(0.005))
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(NUM_RANKS))
    state = trainer.init(params)
    assert "concatenate" in trainer.compile(state, batch).as_text()


def in_two_parts(buffer, axis):
    flat = buffer.reshape(-1)
    padded = jnp.pad(flat, (0, -flat.size % NUM_RANKS))
    part = jax.lax.psum_scatter(padded, axis, tiled=True)
    nothing = jax.lax.psum(flat[:0], axis)  # as half of one element, which XLA drops
    return jnp.append(jax.lax.all_gather(part, axis, tiled=True)[: flat.size], nothing).reshape(buffer.shape)


@pytest.mark.sample
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("hook", "atol"),
    # Of gradients whose sums are up to 4: what bfloat16 and float16 round them to, or the order of float32 sums.
    [(jaxddp.hooks.bf16, 4 * 2**-8), (jaxddp.hooks.fp16, 4 * 2**-11), (in_two_parts, 1e-6)],
    ids=["bf16", "fp16", "own"],
)
def test_what_a_hook_sends_is_planned_and_its_sums_are_used(hook, atol, num_microbatches):
    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) @ params["v"])

    rng = np.random.default_rng(0)
    shapes = {"w": (8, 16), "b": (16,), "v": (16, 3)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x, found = rng.normal(size=(16, 8)).astype(np.float32), []
    for strategy in (jaxddp.bucketed(0.0003, hook=hook), jaxddp.bucketed(0.0003)):
        trainer = jaxddp.Trainer(
            loss_fn, optax.sgd(1.0), strategy, jaxddp.data_mesh(NUM_RANKS), num_microbatches=num_microbatches
        )
        state = trainer.init(params)
        assert len(compiled_as_planned(trainer, state, x)) == 2 * (1 + (strategy.hook is in_two_parts))
        found.append(trainer.params(trainer.step(state, x)[0]))
    for name, exact in found[1].items():
        np.testing.assert_allclose(found[0][name], exact, rtol=0, atol=atol)


@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), jaxddp.zero1(), jaxddp.zero2(), jaxddp.zero3()])
def test_one_rank_and_a_strategy_without_communication_send_nothing(strategy):
    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    params, batch = {"up": jnp.ones((8, 160)), "down": jnp.ones((160, 8))}, np.ones((8, 8), np.float32)
    for num_ranks, one in ((1, strategy), (NUM_RANKS, without_communication(strategy))):
        trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), one, jaxddp.data_mesh(num_ranks))
        assert compiled_as_planned(trainer, trainer.init(params), batch) == []


def test_a_plan_of_other_shapes_is_refused():
    plan = jaxddp.plan_buckets([jaxddp.TensorSpec(name, (size,), "float32") for name, size in (("a", 6), ("b", 2))])
    sync = jax.shard_map(
        lambda grads: jaxddp.sync_gradients(grads, plan, "data"),
        mesh=jaxddp.data_mesh(2), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    assert "[6]" in refusal(sync, {"a": jnp.ones(2), "b": jnp.ones(6)})  # as many in all


def test_bytes_on_the_wire_are_those_of_the_platform():
    strategy = jaxddp.bucketed(25)
    plan = strategy.plan([jaxddp.TensorSpec("a", (8,), "bfloat16")])
    assert planned_collectives(strategy, plan, 2, "gpu") == [("all-reduce", 16)]
    assert planned_collectives(strategy, plan, 2, "cpu") == [("all-reduce", 32)]
    for dtype in (jnp.bfloat16, jnp.float16):
        trainer = jaxddp.Trainer(lambda w, x: jnp.mean(x @ w) ** 2, optax.sgd(0.1), strategy, jaxddp.data_mesh(2))
        state, x = trainer.init(jnp.ones((4, 3), dtype)), np.ones((8, 4), np.float32)
        compiled_as_planned(trainer, state, x)
