"""Models with state beside their parameters: what ranks agree on, what is sent for it, and what training gives."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.comparison_test import NUM_EMPTY, assert_near, refusal, trained
from jaxddp.instruments.schedule import read_schedule

pytestmark = pytest.mark.usefixtures("x64")
NUM_RANKS, WIDTH, EXAMPLES = 4, 6, 72
STRATEGIES = {
    "bucketed": jaxddp.bucketed(1e-4),
    "zero2": jaxddp.zero2(1e-4),
    "zero3": jaxddp.zero3(min_shard_elements=0),
}


class Net(nn.Module):
    """Linear layers with batch normalisation between them, over the examples of a rank or of all."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        # A bias before a normalisation has gradients of rounding errors, which Adam would blow up.
        x = nn.Dense(WIDTH, use_bias=False, param_dtype=x.dtype)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name, param_dtype=x.dtype, momentum=0.9)(x)
        return nn.Dense(1, param_dtype=x.dtype)(jnp.tanh(x))


def loss_of(module):
    def loss_fn(params, stats, batch):
        out, new = module.apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    return loss_fn


RANKS_OWN = loss_of(Net())


def batches(num=3):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(2.0, 3.0, (EXAMPLES, WIDTH)), "y": rng.normal(size=(EXAMPLES, 1))} for _ in range(num)]


@functools.cache
def variables():
    found = jax.jit(Net().init)(jax.random.key(0), jnp.ones((2, WIDTH)))
    found = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), found)
    return found["params"], found["batch_stats"]


def trainer_of(loss_fn, strategy, num_ranks=NUM_RANKS, **options):
    tx = optax.adamw(1e-2)
    return jaxddp.Trainer(loss_fn, tx, strategy, jaxddp.data_mesh(num_ranks), has_state=True, **options)


def train(trainer):
    params, stats = variables()
    return trained(trainer, trainer.init(params, model_state=stats), batches())[0]


@functools.cache
def on_one_device(loss_fn, num_parts, num_microbatches=1, how="mean"):
    """Trains on whole batches, of which each part is normalised by itself, one after the other."""
    params, stats = variables()
    tx = optax.adamw(1e-2)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, stats, opt_state, batch):
        def loss(params):
            losses, after = [], []
            parts = {name: jnp.split(leaf, num_parts) for name, leaf in batch.items()}
            for rank in range(num_parts):
                mine = stats
                pieces = {name: jnp.split(leaf[rank], num_microbatches) for name, leaf in parts.items()}
                for index in range(num_microbatches):
                    one, mine = loss_fn(params, mine, {name: leaf[index] for name, leaf in pieces.items()})
                    losses.append(one)
                after.append(mine)
            new = after[0] if how == "first" else jax.tree.map(lambda *leaves: sum(leaves) / num_parts, *after)
            return sum(losses) / len(losses), new

        grads, new = jax.grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new, opt

    for batch in batches():
        params, stats, opt_state = step(params, stats, opt_state, batch)
    return params, stats


def assert_counted_apart(trainer, calls_collectives):
    """The collectives of the strategy, of the model's state, and those that the loss function calls."""
    params, stats = variables()
    state, batch = trainer.abstract_state(params, stats), batches()[0]
    schedule = read_schedule(trainer.compile(state, batch))
    found = schedule.collectives()
    assert schedule.gradient_collectives() == sorted(trainer.planned(state, batch))
    programs = trainer.programs(state)
    assert [(c.kind, c.num_bytes) for c in found if c.is_model_state] == programs.planned_sync(state)
    assert programs.planned_sync(state) == [("all-reduce", 2 * WIDTH * 8)]
    others = [(c.kind, c.num_bytes) for c in found if not (c.is_gradients or c.is_model_state or c.is_metrics)]
    assert bool(others) == calls_collectives


def assert_trained_as(trainer, state, params, stats):
    assert_near(trainer.params(state), params)
    assert_near(trainer.model_state(state), stats)
    for leaf in jax.tree.leaves(state.model_state):
        assert len({np.asarray(one.data).tobytes() for one in leaf.addressable_shards}) == 1  # ranks hold the same


@pytest.mark.parametrize(
    ("name", "options", "parts"),  # whose statistics are averaged, each in turn over its micro-batches
    [
        ("bucketed", {}, (NUM_RANKS,)),
        ("zero2", {"num_microbatches": 3}, (NUM_RANKS, 3)),
        ("zero3", {"state_sync": "first"}, (NUM_RANKS, 1, "first")),
    ],
)
def test_each_rank_normalises_its_examples_and_ranks_average_their_statistics(name, options, parts):
    trainer = trainer_of(RANKS_OWN, STRATEGIES[name], **options)
    assert_trained_as(trainer, train(trainer), *on_one_device(RANKS_OWN, *parts))
    assert_counted_apart(trainer, calls_collectives=False)


def test_statistics_over_the_axis_are_those_of_the_whole_batch():
    trainer = trainer_of(loss_of(Net(axis_name="data")), STRATEGIES["zero3"])
    assert_trained_as(trainer, train(trainer), *on_one_device(RANKS_OWN, 1))
    assert_counted_apart(trainer, calls_collectives=True)


EMPTY = {} if NUM_EMPTY else {"empty": np.zeros(0)}


def mixed_state():
    return {
        "ema": jnp.zeros(3), "narrow": jnp.zeros((), jnp.float16), "count": jnp.zeros((), jnp.int32),
        "seen": jnp.zeros((), bool),
    } | EMPTY  # fmt: skip


def mixed_loss(params, state, batch, key):
    loss = jnp.mean((batch["x"] @ params["w"]) ** 2)
    rank = jax.lax.axis_index("data")
    new = {
        "ema": 0.5 * state["ema"] + jnp.mean(batch["x"], axis=0)[:3],
        "narrow": state["narrow"] + 3e4,  # four of them are more than float16 holds
        "count": state["count"] + 1 + rank,
        "seen": rank == 0,
    }
    return loss, (state | new, {"rank": jnp.float32(rank)})


def test_leaves_of_any_dtype_with_a_key_and_aux(tmp_path):
    trainer = trainer_of(mixed_loss, jaxddp.zero1(), has_aux=True)
    state = trainer.init({"w": jnp.ones((WIDTH, 1))}, model_state=mixed_state())
    batch = batches()[0]
    planned = sorted(("all-reduce", num_bytes) for num_bytes in ((3 + 1) * 8, 4, 1))
    assert sorted(trainer.programs(state).planned_sync(state)) == planned
    compiled = read_schedule(trainer.compile(state, batch)).collectives()
    assert sorted((c.kind, c.num_bytes) for c in compiled if c.is_model_state) == planned
    state, metrics = trainer.step(state, batch)
    found = trainer.model_state(state)
    np.testing.assert_allclose(found["ema"], batch["x"].mean(0)[:3], rtol=0, atol=1e-12)
    assert (found["count"], found["narrow"], found["seen"]) == (1, np.float16(3e4), True)
    assert metrics["aux"]["rank"] == (NUM_RANKS - 1) / 2
    other = trainer_of(mixed_loss, jaxddp.zero3(min_shard_elements=0), num_ranks=2, has_aux=True)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state)
        restored, _ = checkpoints.restore(other, {"w": jnp.zeros((WIDTH, 1))}, model_state=mixed_state())
    again = other.model_state(restored)
    assert again["count"] == 1 and (np.asarray(again["ema"]) == np.asarray(found["ema"])).all()


def test_a_micro_batch_without_examples_that_count_leaves_it():
    def loss_fn(params, state, batch):
        mask = batch["mask"]
        mean = jnp.sum(batch["x"] * mask) / jnp.sum(mask)
        total = jnp.sum((batch["x"] * params["w"]) ** 2 * mask)
        return jaxddp.Weighted(total, jnp.sum(mask)), {"mean": 0.5 * state["mean"] + 0.5 * mean}

    trainer = trainer_of(loss_fn, jaxddp.bucketed(), num_ranks=2, num_microbatches=2)
    state = trainer.init({"w": jnp.ones(())}, model_state={"mean": jnp.ones(())})
    batch = {"x": np.arange(1.0, 9.0), "mask": np.array([1.0, 1, 0, 0, 0, 0, 0, 0])}  # one of rank 0's two counts
    state, _ = trainer.step(state, batch)
    assert trainer.model_state(state)["mean"] == ((0.5 + 0.5 * 1.5) + 1.0) / 2


def test_evaluation_takes_it_and_leaves_it_and_must_know_that_it_is_none():
    def loss_fn(params, state, batch, key=None):
        offset = state["offset"] if key is None else jnp.nan
        return jnp.mean(batch["x"]) * params["w"] + offset, {"offset": state["offset"] + 1}

    trainer = trainer_of(loss_fn, jaxddp.bucketed())
    state = trainer.init({"w": jnp.zeros(())}, model_state={"offset": jnp.ones(())})
    assert trainer.evaluate(state, batches()[0]) == 1
    assert trainer.model_state(state)["offset"] == 1
    trainer = trainer_of(RANKS_OWN, jaxddp.bucketed())  # normalises by the examples at hand
    params, stats = variables()
    found = refusal(trainer.evaluate, trainer.init(params, model_state=stats), batches()[0])
    assert found.startswith("evaluate tells loss_fn (=loss_fn) by key=None")


def test_a_state_of_another_form_is_refused():
    for new_state, message in (
        (lambda state: {"b": state["a"]}, "new_state (=PyTreeDef({'b': *})) must be as model_state (="),
        (lambda state: {"a": state["a"][:1]}, "new_state leaf 'a' (=float64[1])"),
        (lambda state: {"a": state["a"].astype(jnp.float32)}, "new_state leaf 'a' (=float32[2])"),
    ):
        trainer = trainer_of(lambda params, state, batch: (params["w"].sum(), new_state(state)), jaxddp.bucketed())  # noqa: B023
        state = trainer.init({"w": jnp.ones(2)}, model_state={"a": jnp.ones(2)})
        assert message in refusal(trainer.step, state, {"x": np.ones(4)})


def test_bad_input():
    make = functools.partial(jaxddp.Trainer, lambda *args: 0.0, optax.sgd(0.1), jaxddp.naive(), jaxddp.data_mesh(2))
    params, model_state = {"w": jnp.ones(2)}, {"a": jnp.ones(2)}
    assert "state_sync (='sum') must be one of mean, first" in refusal(make, has_state=True, state_sync="sum")
    for none in (None, ()):
        assert "must be given, an empty one" in refusal(make(has_state=True).init, params, model_state=none)
    assert "has_state=True" in refusal(make().abstract_state, params, model_state)
    found = refusal(make(has_state=True).init, params, model_state={"a": jax.random.key(0)})
    assert found == "model_state leaf 'a' must be no key, equal on all ranks: let loss_fn take key"
    assert "model_state leaf 'a' (=1.0)" in refusal(make(has_state=True).init, params, model_state={"a": 1.0})
    trainer = make(has_state=True, has_aux=True)
    found = refusal(trainer.step, trainer.init(params, model_state=model_state), {"x": np.ones(4)})
    assert "must return (loss, (new_state, aux))" in found
