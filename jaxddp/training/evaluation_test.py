"""What ``evaluate`` gives, a loss or measures of any number of examples, and what aux values mean."""

import functools
import itertools
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.comparison_test import assert_near, compiled_as_planned, refusal
from jaxddp.loss import measured
from jaxddp.mesh_test import run_workers


def trainer(loss_fn, strategy=jaxddp.bucketed(), **options):  # noqa: B008
    return jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(2), **options)


def batch(rows=8):
    return {"x": jnp.arange(rows * 3.0).reshape(rows, 3)}


PARAMS = {"w": np.ones(3, np.float32)}


def dropped(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return jnp.mean(jnp.where(keep, batch["x"], 0) @ params["w"])


def test_evaluate_gives_aux_and_draws_nothing_where_the_key_has_a_default():
    def loss_fn(params, batch, key=None):
        out = batch["x"] @ params["w"]
        return jnp.mean(out) if key is None else dropped(params, batch, key), {"square": jnp.mean(out**2)}

    one = trainer(loss_fn, has_aux=True)
    loss, aux = one.evaluate(one.init(PARAMS), batch())
    expected, expected_aux = loss_fn(PARAMS, batch())
    np.testing.assert_allclose([loss, aux["square"]], [expected, expected_aux["square"]], rtol=1e-6)
    one = trainer(dropped)
    assert "key=None" in refusal(one.evaluate, one.init(PARAMS), batch())


# Aux values where a mean over ranks would be wrong


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [jaxddp.bucketed(), jaxddp.zero3(min_shard_elements=0)], ids=lambda one: one.name)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_marked_values_are_those_of_all_examples(strategy, num_microbatches):
    def loss_fn(params, batch):
        out = batch["x"] * params["w"]
        each, large = out.sum(1), out > 30
        marked = {
            "share": large.mean(),
            "moments": jaxddp.Weighted(jnp.stack([jnp.mean(out**k) for k in range(2)]), 1),
            "mean_large": jaxddp.Weighted((out * large).sum(), large.sum()),  # of no weight in the first micro-batch
            "mean": jaxddp.Mean(out),
            "sum": jaxddp.Sum(each.astype(jnp.float16)),  # of numbers above 2^11, where float16 has no odd ones
            "count": jaxddp.Sum(out > 20),
            "each": jaxddp.PerExample(each > 20),
            "rows": jaxddp.PerExample(out),
        }
        return jaxddp.Weighted(jnp.sum(each[:2]), 2), marked  # whose weights are the loss's alone

    one = trainer(loss_fn, strategy=strategy, has_aux=True, num_microbatches=num_microbatches)
    state, full = one.init(PARAMS), batch(48)["x"]
    compiled_as_planned(one, state, batch(48))
    compiled = jaxddp.read_schedule(one.compile(state, batch(48))).collectives()
    kinds = Counter(each.kind for each in compiled if each.is_metrics)
    norm = strategy.name == "zero3"  # whose squares are summed apart
    assert kinds == {"all-reduce": 2 + norm, "all-gather": 2}
    state, metrics = one.step(state, batch(48))
    expected = {"mean": full.mean(0), "sum": full.sum(), "count": (full > 20).sum(0), "each": full.sum(1) > 20}
    expected |= {"share": (full > 30).mean(), "moments": [1, full.mean()], "mean_large": full[full > 30].mean()}
    for name, value in (expected | {"rows": full}).items():
        np.testing.assert_allclose(metrics["aux"][name], value, rtol=1e-6)
    assert metrics["aux"]["count"].dtype == jnp.int32
    if num_microbatches == 1:
        _, aux = one.evaluate(state, batch(48))
        np.testing.assert_array_equal(aux["each"].shape, (48,))


def test_what_has_no_one_meaning_is_refused():
    for aux, message in (
        (lambda out: out[:, 0], "aux leaf 'a' (=[4]) must be marked: "),  # as long as a rank's part of the batch
        (lambda out: jaxddp.Mean(out[:2]), "aux leaf 'a' (=Mean of [2, 3]) must have the 4 examples"),
        (lambda out: jnp.sum(out > 0), "aux leaf 'a' (=int32)"),
    ):

        def loss_fn(params, batch, aux=aux):
            out = batch["x"] * params["w"]
            return jnp.mean(out), {"a": aux(out)}

        one = trainer(loss_fn, has_aux=True)
        assert message in refusal(one.step, one.init(PARAMS), batch())


def error_of(params, scale, batch):
    return (jnp.tanh(batch["x"] @ params["w"]) * scale - batch["y"]) ** 2


def measure(params, state, batch):
    error = error_of(params, state["scale"], batch)
    norm = error / batch["y"]  # NaN where padding is 0
    return {
        "mean": jaxddp.Mean(error), "nested": {"sum": jaxddp.Sum(norm[:, 0])}, "count": jaxddp.Sum(error > 1),
        "each": jaxddp.PerExample(norm), "rows": jaxddp.PerExample(batch["id"]),
    }  # fmt: skip


def rows(number, first=0):
    rng = np.random.default_rng(number)
    x, y = rng.normal(size=(number, 3)), rng.normal(size=(number, 2)) + 3
    return {"x": x, "y": y, "id": np.arange(first, first + number)}


def stateful(strategy, num_ranks=4):
    def loss_fn(params, state, batch, key=None):
        return error_of(params, state["scale"], batch).mean(), {"scale": state["scale"] * 2}

    one = jaxddp.Trainer(loss_fn, optax.adam(0.1), strategy, jaxddp.data_mesh(num_ranks), has_state=True)
    weights = np.random.default_rng(0).normal(size=(3, 2))
    return one, one.init({"w": weights}, model_state={"scale": np.float64(1.5)}), {"w": weights}


@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero3"])
def test_measures_are_those_of_one_device_with_an_uneven_last_batch(name, x64):
    traces = []

    def eval_fn(*args):
        traces.append(args)
        return measure(*args)

    options = {"min_shard_elements": 0} if name == "zero3" else {}
    one, state, params = stateful(jaxddp.make_strategy(name, **options))
    batches = [rows(12), rows(12, 12), rows(5, 24)]
    found = one.evaluate(state, iter(batches), eval_fn)
    assert len(traces) == 1
    full = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    expected = measure(params, {"scale": 1.5}, full)
    assert_near(found["mean"], expected["mean"].values.mean(0))
    assert_near(found["nested"]["sum"], expected["nested"]["sum"].values.sum())
    assert_near(found["each"], expected["each"].values)
    assert_near([found["rows"], found["count"]], [np.arange(29), expected["count"].values.sum(0)], atol=0)
    assert found["count"].dtype == np.int64 and isinstance(found["nested"]["sum"], float)
    assert one.model_state(state)["scale"] == 1.5
    np.testing.assert_array_equal(one.params(state)["w"], params["w"])


def test_a_batch_is_one_all_reduce_and_what_is_kept(x64):
    one, state, _ = stateful(jaxddp.zero1())
    program = one.programs(state).evaluate(
        state, (rows(12), np.ones(12, bool)), functools.partial(measured, measure, True)
    )
    collectives = jaxddp.read_schedule(program).collectives()
    # Two values of each example, and whether it counts; three means and sums with the number of examples, and counts.
    expected = [("all-gather", num_bytes) for num_bytes in (12, 12 * 8, 12 * 2 * 8)]
    expected += [("all-reduce", 2 * 8), ("all-reduce", 4 * 8)]
    assert sorted((each.kind, each.num_bytes) for each in collectives) == expected
    assert all(each.is_metrics for each in collectives)


def mean_x(params, batch):
    (x, *_) = jax.tree.leaves(batch)
    return {"mean": jaxddp.Mean(x), "each": jaxddp.PerExample(x[:, 0])}


X = np.arange(21.0, dtype="f4").reshape(7, 3)


def test_batches_come_in_many_kinds():
    one = trainer(lambda params, batch: jnp.sum(params["w"]))
    for batches in (
        X, (X, X), [X, X], [{"x": X[:4]}, {"x": X[4:]}], [[X[:4], X[:4]], [X[4:], X[4:]]],
        (X[k:][:3] for k in (0, 3, 6)), [(X[:3],), (X[3:3],), (X[3:],)], map(jnp.asarray, [X[:6], X[6:]]),
    ):  # fmt: skip
        found = one.evaluate(one.init(PARAMS), batches, mean_x)
        np.testing.assert_allclose(found["mean"], X.mean(0), rtol=1e-6)
        np.testing.assert_array_equal(found["each"], X[:, 0])


def test_sums_over_batches_are_wider_than_those_of_one():
    one = trainer(lambda params, batch: jnp.sum(params["w"]))
    batches = itertools.repeat(np.full((4, 1), 2**22, "f4"), 3)
    found = one.evaluate(
        one.init(PARAMS), itertools.chain(batches, [np.ones((1, 1), "f4")]), lambda params, x: {"sum": jaxddp.Sum(x)}
    )
    assert found["sum"] == 3 * 2**24 + 1


def marks(kind):
    return lambda params, x: {"a": kind(x)}


def test_what_is_refused():
    one = trainer(lambda params, batch: jnp.mean(batch @ params["w"]))
    for batches, eval_fn, message in (
        ([], mean_x, "batches hold no examples"),
        ("x", mean_x, "must be arrays whose dimension 0 counts examples"),
        ((X, X[:3]), mean_x, "batch (={'0': 7, '1': 3}) must be arrays"),
        (X, lambda params, x: x, "eval_fn (=<lambda>) must return a dict"),
        (X, marks(jnp.mean), "must be marked as jaxddp.Mean, Sum or PerExample"),
        (X, marks(lambda x: jaxddp.Sum(x.sum())), "'a' (=Sum of []) must have the 4 examples"),
        (iter([X, X[:, :1]]), marks(jaxddp.Sum), "inhomogeneous shape"),
    ):
        assert message in refusal(one.evaluate, one.init(PARAMS), batches, eval_fn)


WORKER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax, jaxddp
address, process_id = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 2)
jaxddp.start_process(address, 2, process_id)

def eval_fn(params, batch):
    return {"mean": jaxddp.Mean(batch * params["w"]), "each": jaxddp.PerExample(batch)}

x = np.arange(20, dtype="f4")
mine = ([x[:4], x[8:10], x[13:16]], [x[4:8], x[10:13]])[process_id]  # one has more batches, the other longer ones
trainer = jaxddp.Trainer(lambda params, batch: jnp.mean(batch * params["w"]), optax.sgd(0.1), jaxddp.zero1(),
    jaxddp.data_mesh())
state = trainer.init({"w": np.ones((), "f4")})
found = trainer.evaluate(state, iter(mine), eval_fn)
by_rank = jax.NamedSharding(trainer.mesh, jax.P("data"))
whole = jax.make_array_from_process_local_data(by_rank, x[10 * process_id :][:10])
whole = trainer.evaluate(state, iter([whole, whole[:12]]), eval_fn)["each"].tolist()
try:
    trainer.evaluate(state, [] if process_id else x[:2], eval_fn)
except ValueError as error:
    refused = str(error)
print(json.dumps([float(found["mean"]), found["each"].tolist(), whole, refused]))
"""


def test_processes_give_rows_of_their_own_and_get_the_same():
    refused = "each process must have a batch, which may hold no examples: one has none"
    expected = [7.5, list(range(16)), [*range(20), *range(12)], refused]
    assert [json.loads(line) for line in run_workers(WORKER, 2)] == [expected] * 2
