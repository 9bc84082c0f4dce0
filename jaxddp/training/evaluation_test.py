"""What ``evaluate`` gives: a loss, or measures of any number of examples."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.mesh_test import run_workers
from jaxddp.metrics import Measure


def trainer(loss_fn, num_ranks=2, **options):
    return jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh(num_ranks), **options)


def batch(rows=8):
    return {"x": jnp.arange(rows * 3.0).reshape(rows, 3)}


PARAMS = {"w": np.ones(3, np.float32)}


def dropped(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return jnp.mean(jnp.where(keep, batch["x"], 0) @ params["w"])


def test_evaluate_draws_nothing_where_the_key_has_a_default():
    def loss_fn(params, batch, key=None):
        return jnp.mean(batch["x"] @ params["w"]) if key is None else dropped(params, batch, key)

    one = trainer(loss_fn)
    found = one.evaluate(one.init(PARAMS), batch())
    np.testing.assert_allclose(found, loss_fn(PARAMS, batch()), rtol=1e-6)


def test_evaluate_refuses_a_loss_that_cannot_go_without_a_key():
    one = trainer(dropped)
    with pytest.raises(ValueError, match=r"evaluate gives no key.*key=None"):
        one.evaluate(one.init(PARAMS), batch())


def test_evaluate_gives_aux_as_well():
    def loss_fn(params, batch):
        out = batch["x"] @ params["w"]
        return jnp.mean(out), {"square": jnp.mean(out**2)}

    one = trainer(loss_fn, has_aux=True)
    loss, aux = one.evaluate(one.init(PARAMS), batch())
    expected, expected_aux = loss_fn(PARAMS, batch())
    np.testing.assert_allclose([loss, aux["square"]], [expected, expected_aux["square"]], rtol=1e-6)


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


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


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
    np.testing.assert_allclose(found["mean"], expected["mean"].values.mean(0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["nested"]["sum"], expected["nested"]["sum"].values.sum(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["each"], expected["each"].values, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(found["rows"], np.arange(29))
    np.testing.assert_array_equal(found["count"], expected["count"].values.sum(0))
    assert found["count"].dtype == np.int64 and isinstance(found["nested"]["sum"], float)
    assert one.model_state(state)["scale"] == 1.5
    np.testing.assert_array_equal(one.params(state)["w"], params["w"])


def test_a_batch_is_one_all_reduce_and_what_is_kept(x64):
    one, state, _ = stateful(jaxddp.zero1())
    kinds = {
        ("mean",): [("all-reduce", 3 * 8)],  # two means and the number of examples
        ("mean", "nested"): [("all-reduce", 4 * 8)],
        ("mean", "count"): [("all-reduce", 3 * 8), ("all-reduce", 2 * 8)],
        ("mean", "each"): [("all-reduce", 3 * 8), ("all-gather", 12 * 2 * 8)],
    }
    for names, expected in kinds.items():

        def some(*args, names=names):
            found = measure(*args)
            return {name: found[name] for name in names}

        program = one._model(state).evaluate(state, (rows(12), np.ones(12, bool)), Measure(some, True))
        collectives = jaxddp.read_schedule(program).collectives()
        assert sorted((each.kind, each.num_bytes) for each in collectives) == sorted(expected)
        assert all(each.is_metrics for each in collectives)


def mean_x(params, batch):
    (x, *_) = jax.tree.leaves(batch)
    return {"mean": jaxddp.Mean(x), "each": jaxddp.PerExample(x[:, 0])}


X = np.arange(21.0, dtype="f4").reshape(7, 3)


@pytest.mark.parametrize(
    "batches",
    [
        {"x": X}, X, (X, X), [X, X],
        [{"x": X[:4]}, {"x": X[4:]}], [[X[:4], X[:4]], [X[4:], X[4:]]], ((X[:1], X[1:5], X[5:])[k] for k in range(3)),
        [(X[:3],), (X[3:3],), (X[3:],)], map(jnp.asarray, [X[:6], X[6:]]),
    ],
    ids=["dict", "array", "tuple", "list of arrays", "list of dicts", "list of lists", "generator", "empty", "jax"],
)  # fmt: skip
def test_batches_come_in_many_kinds(batches):
    one = trainer(lambda params, batch: jnp.sum(params["w"]))
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


@pytest.mark.parametrize(
    ("batches", "eval_fn", "message"),
    [
        ([], mean_x, r"batches hold no examples: there must be at least one"),
        ("x", mean_x, r"batch leaf '' \(='x'\) must be an array"),
        ([X, 3], mean_x, r"batch leaf '1' \(=3\) must be an array"),
        ((X, X[:3]), mean_x, r"batch leaves must agree in length, they have {'0': 7, '1': 3}"),
        (X, 3, r"eval_fn \(=3\) must be a function"),
        (X, lambda params, x: x, r"eval_fn \(=<lambda>\) must return a dict of jaxddp.Mean, Sum or PerExample"),
        (X, lambda params, x: {"a": x.mean()}, r"eval_fn \(=<lambda>\): 'a' \(=array of \[\]\) must be marked"),
        (X, lambda params, x: {"a": jaxddp.Sum(x.sum())}, r"eval_fn \(=<lambda>\): 'a' \(=Sum of array of \[\]\) must "
         "have the 4 examples at hand as dimension 0 of an array"),
        (iter([X, X[:, :1]]), lambda params, x: {"a": jaxddp.Sum(x)}, r"values of examples \(=\[1\]\) must have one "
         r"shape, \[3\] before"),
        ([{"a": X}, {"b": X}], lambda params, x: {name: jaxddp.Sum(one) for name, one in x.items()}, r"eval_fn must "
         r"return the same names for every batch: \['b'\], and \['a'\] before"),
        (X, type("Own", (), {"__hash__": None, "__call__": mean_x})(), r"eval_fn \(=Own\) must be hashable"),
    ],
)  # fmt: skip
def test_what_is_refused(batches, eval_fn, message):
    one = trainer(lambda params, batch: jnp.sum(params["w"]))
    with pytest.raises(ValueError, match=f"^[^\n]*{message}"):
        one.evaluate(one.init(PARAMS), batches, eval_fn)


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
    expected = [
        7.5,
        list(range(16)),
        [*range(20), *range(12)],
        "process 1 has no batch: each must have one, which may hold no examples",
    ]
    assert [json.loads(line) for line in run_workers(WORKER, 2)] == [expected] * 2
