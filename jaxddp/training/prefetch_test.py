"""``prefetch``: batches on the ranks ahead of use, in order, to the end or to the error that ends them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp


def trainer(**options):
    loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)  # noqa: E731
    return jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh(4), **options)


def batch(number, rows=8):
    return {"x": np.full((rows, 3), number, "f4")}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_batches_lie_on_the_ranks_ahead_of_use(size):
    one, read = trainer(), []

    def source():
        for number in range(4):
            read.append(number)
            yield batch(number)

    threads = threading.active_count()
    batches = jaxddp.prefetch(source(), one, size)
    assert read == []
    for number, found in enumerate(batches):
        assert found["x"].sharding == one.batch_sharding == jax.NamedSharding(one.mesh, jax.P(("data",)))
        assert float(found["x"][0, 0]) == number
        assert read == list(range(min(number + size, 4)))
    assert number == 3 and next(batches, None) is None
    assert threading.active_count() == threads


def test_training_is_the_same_and_evaluation_gets_the_uneven_last_batch():
    one, rest = trainer(), batch(2, rows=7)
    ends = []
    for wrap in (iter, lambda batches: jaxddp.prefetch(batches, one)):
        state = one.init({"w": jnp.ones((3, 1))})
        for found in wrap([batch(1), batch(2)]):
            state, _ = one.step(state, found)
        measures = one.evaluate(state, wrap([batch(1), rest]), lambda params, batch: {"sum": jaxddp.Sum(batch["x"])})
        assert measures["sum"].tolist() == [8 + 14] * 3
        ends.append(np.asarray(one.params(state)["w"]))
    np.testing.assert_array_equal(*ends)


def test_errors_come_after_the_batches_before_them():
    def source():
        yield batch(0)
        yield batch(1)
        raise OSError("the disk is gone")

    batches = jaxddp.prefetch(source(), trainer(), size=4)
    assert [float(next(batches)["x"][0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert next(batches, None) is None
    batches = jaxddp.prefetch([batch(0), {"x": 3}], trainer())
    next(batches)
    with pytest.raises(ValueError, match=r"^batch leaf 'x' \(=3\) must be an array"):
        next(batches)


def test_a_loop_that_ends_early_closes_what_it_read_from():
    closed = []

    def source():
        try:
            while True:
                yield batch(0)
        finally:
            closed.append(True)

    for _ in jaxddp.prefetch(source(), trainer()):
        break
    assert closed == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, trainer), r"iterator \(=3\) must be an iterable of batches"),
        (([], lambda: None), r"trainer \(=None\) must be a jaxddp.Trainer"),
        (([], trainer, 0), r"size \(=0\) must be a positive integer"),
        (([], trainer, True), r"size \(=True\) must be a positive integer"),
    ],
)
def test_what_is_refused(arguments, message):
    iterator, make, *size = arguments
    with pytest.raises(ValueError, match=f"^{message}$"):
        jaxddp.prefetch(iterator, make(), *size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_readers_may_refill_their_arrays(dtype):
    """On CPUs, devices share memory with NumPy and PyTorch."""
    torch = pytest.importorskip("torch")
    filled = {"array": np.zeros((64, 64), "f4"), "tensor": torch.zeros(64, 64, dtype=getattr(torch, dtype))}

    def refilled():
        for number in range(4):
            filled["array"][...] = number
            filled["tensor"][...] = number
            yield filled

    on_one = jaxddp.Trainer(lambda params, batch: 0.0, optax.sgd(0.1), jaxddp.bucketed(), jaxddp.data_mesh(1))
    found = [{name: float(leaf.max()) for name, leaf in one.items()} for one in jaxddp.prefetch(refilled(), on_one)]
    assert found == [{"array": number, "tensor": number} for number in range(4)]
