import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.checkpoint.host_state import to_host
from jaxddp.comparison_test import NUM_EMPTY, assert_near, drawn, refusal as line_of, trained
from jaxddp.models.toy_test import ToyMLP

pytestmark = pytest.mark.usefixtures("x64")
NUM_STEPS = 5
BATCH = 24  # of all ranks: divides by 8, 3, 2 x 3 micro-batches and 1


def loss_fn(params, batch):
    hidden = batch["x"] @ params["w"] + params["b"]
    for layer in params["stack"]:
        hidden = jnp.tanh(hidden @ layer)
    return jnp.mean((params["scale"] * hidden - batch["y"]) ** 2) + jnp.sum(params["empty"])


def make_params(dtype=np.float64):
    return jax.tree.map(jnp.asarray, drawn(0, dtype, w=(5, 8), b=8, stack=(2, 8, 8), scale=(), empty=(NUM_EMPTY, 3)))


def batch_of(position):
    return drawn(position, x=(BATCH, 5), y=(BATCH, 8))


def make(strategy, num_ranks=None, loss_fn=loss_fn, optimizer=None, mesh=None, **options):
    if optimizer is None:
        # A table: Optax computes schedules in float32, which rounds one way or the other with what XLA fuses.
        rates = np.linspace(1e-2, 1e-3, NUM_STEPS)
        optimizer = optax.adamw(
            lambda count: jnp.asarray(rates)[count], mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
        )
    mesh = mesh or jaxddp.data_mesh(num_ranks)
    return jaxddp.Trainer(loss_fn, optimizer, strategy, mesh, max_grad_norm=0.5, **options)


# Each pads some leaf: 8 elements for 3 ranks, a scalar for 2.
RUNS = {
    "zero3 on 8": lambda: make(jaxddp.zero3(min_shard_elements=8), 8),
    "bucketed on 3": lambda: make(jaxddp.bucketed(0.0005), 3),
    "zero2 on 2, accumulating": lambda: make(jaxddp.zero2(), 2, num_microbatches=3),
    "zero1 on 4": lambda: make(jaxddp.zero1(), 4),
    "naive on 1": lambda: make(jaxddp.naive(), 1),
    "zero3 on 3, accumulating": lambda: make(jaxddp.zero3(min_shard_elements=0), 3, num_microbatches=4),
}
trainer_of = functools.cache(lambda name: RUNS[name]())


def advance(trainer, state, position, num_steps):
    for _ in range(num_steps):
        state, _ = trainer.step(state, batch_of(position))
        position += BATCH
    return state, position


@functools.cache
def uninterrupted(num_steps=NUM_STEPS):
    trainer = trainer_of("naive on 1")
    state, _ = advance(trainer, trainer.init(make_params()), 0, num_steps)
    return dict_of(trainer, state)


def dict_of(trainer, state):
    return dict(to_host(trainer, state))


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes(), name


def assert_restored_elsewhere(folder, trainer, params, batches):
    """Two of four steps on a mesh and two on another, either way round, are four steps."""
    flat = jaxddp.Trainer(trainer.loss_fn, trainer.optimizer, jaxddp.zero1(), jaxddp.data_mesh(4))
    whole, _ = trained(flat, flat.init(params), batches)
    for number, (one, other) in enumerate(((trainer, flat), (flat, trainer))):
        with Checkpoints(folder / str(number)) as checkpoints:
            state, _ = trained(one, one.init(params), batches[:2])
            checkpoints.save(one, state)
            state, _ = checkpoints.restore(other, params)
        state, _ = trained(other, state, batches[2:])
        assert_near(other.params(state), flat.params(whole))


JOURNEY = (
    "zero3 on 8", "bucketed on 3", "zero1 on 4", "zero3 on 8", "zero3 on 3, accumulating", "zero2 on 2, accumulating",
    "zero3 on 8",
)  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize("first_steps", range(1, NUM_STEPS))
@pytest.mark.parametrize(("before", "after"), [*itertools.pairwise(JOURNEY)])
def test_interrupted_at_any_step_and_resumed_elsewhere_it_is_the_uninterrupted_training(
    tmp_path, before, after, first_steps
):
    trainer = trainer_of(before)
    with Checkpoints(tmp_path) as checkpoints:
        state, position = advance(trainer, trainer.init(make_params()), 0, first_steps)
        checkpoints.save(trainer, state, data_position=position)
    trainer = RUNS[after]()  # which has not seen the model
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == first_steps
        state, position = checkpoints.restore(trainer, jax.eval_shape(make_params))
    assert position == first_steps * BATCH
    state, _ = advance(trainer, state, position, NUM_STEPS - first_steps)
    assert_near(dict_of(trainer, state), uninterrupted())


def test_what_is_saved_is_whole_under_its_own_name(tmp_path):
    trainer = trainer_of("zero3 on 8")
    state = trainer.init(make_params())
    expected = {"format": 3, "step": 0, "strategy": "zero3", "num_ranks": 8, "data_position": {"line": 7}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state, data_position=expected["data_position"])
        about = checkpoints.about(0)
    assert {key: about[key] for key in expected} == expected
    shapes = {name: tuple(row["shape"]) for name, row in about["leaves"].items()}
    params = {name: leaf.shape for name, leaf in make_params().items()}
    for prefix in ("params", "opt_state.0.mu", "opt_state.0.nu"):
        assert {name: shapes[f"{prefix}.{name}"] for name in params} == params
    assert len(shapes) == 3 * len(params) + 4  # step, key, and two counts
    assert {row["dtype"] for row in about["leaves"].values()} == {"float64", "int32", "key<fry>"}


def test_dropout_and_noise_go_on_with_their_keys(tmp_path):
    def noisy_loss(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return loss_fn(params, {**batch, "x": batch["x"] * kept})

    noise = optax.add_noise(0.1, 0.5, jax.random.key(5, impl="rbg"))
    trainer = make(jaxddp.bucketed(), 2, noisy_loss, optax.chain(noise, optax.sgd(0.1)))
    state, _ = advance(trainer, trainer.init(make_params(), seed=3), 0, 4)
    expected = dict_of(trainer, state)
    state, position = advance(trainer, trainer.init(make_params(), seed=3), 0, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state, data_position=position)
        state, position = checkpoints.restore(trainer, make_params())
    state, _ = advance(trainer, state, position, 2)
    assert_same(dict_of(trainer, state), expected)


def tree_of(dtype=jnp.bfloat16):
    layers = [(make_params(dtype), {"a/b": jnp.ones(3, dtype)}), jnp.arange(4)]
    keys = {"key": jax.random.key(7), "other key": jax.random.key(8, impl="rbg")}
    return {"layers": layers, "": jnp.full((), 1 / 3, dtype), **keys}


@pytest.mark.parametrize(
    ("make_tree", "strategy"),
    [
        (tree_of, jaxddp.zero1()),
        (lambda: nnx.state(ToyMLP(10, 16, 5, rngs=nnx.Rngs(0)), nnx.Param), jaxddp.zero3(min_shard_elements=0)),
    ],
    ids=["bfloat16", "flax"],
)
def test_every_bit_comes_back_in_trees_of_every_kind(tmp_path, make_tree, strategy):
    params = make_tree()
    trainer = make(
        strategy, 8, lambda params, batch: 0.0, trainable=lambda name: "key" not in name and name != "layers.1"
    )
    state = trainer.init(params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state)
        restored, position = checkpoints.restore(trainer, params)
        arrays = {name: params[name] for name in params}
        alone = checkpoints.restore_params(arrays)
    assert jax.tree.all(jax.tree.map(lambda one, other: bool(jnp.all(one == other)), alone, arrays))
    assert position is None
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_same(dict_of(trainer, restored), dict_of(trainer, state))
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)


def test_parameters_are_restored_in_part(tmp_path):
    params = make_params()
    with Checkpoints(tmp_path) as checkpoints:
        trainer = make(jaxddp.zero3(min_shard_elements=8), 4)
        state, _ = trainer.step(trainer.init(params), batch_of(0))
        checkpoints.save(trainer, state)
        trained = trainer.params(state)

        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        part = checkpoints.restore_params({"w": shapes["w"]})  # the rest stays in the checkpoint
        assert np.array_equal(part["w"], trained["w"])
        found = line_of(checkpoints.restore_params, shapes | {"new": np.zeros(2)})
        assert "is of another model: params.new is missing there and float64 (2,)" in found


def test_a_model_state_may_hold_infinity_but_not_nan(tmp_path):
    def with_state(params, model_state, batch, key=None):
        return loss_fn(params, batch), model_state

    trainer = make(jaxddp.bucketed(), 2, loss_fn=with_state, has_state=True, nonfinite="skip")
    with Checkpoints(tmp_path) as checkpoints:
        mask = {"mask": np.array([0, -np.inf])}
        state, metrics = trainer.step(trainer.init(make_params(), model_state=mask), batch_of(0))
        checkpoints.save(trainer, state)
        assert metrics["skipped"] == 0
        assert_same(checkpoints.restore_params({}, model_state=mask)[1], mask)
        wrong = state._replace(model_state={"mask": np.array([0, np.nan])}, step=state.step + 1)
        with pytest.raises(FloatingPointError, match="model_state.mask"):
            checkpoints.save(trainer, wrong)


def test_a_learning_rate_that_is_set_by_hand_may_be_any_number(tmp_path):
    trainer = make(jaxddp.zero1(), 2, optimizer=optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    state, _ = trainer.step(trainer.init(make_params()), batch_of(0))
    with Checkpoints(tmp_path) as checkpoints:
        for rate in (0.5, np.float32(0.25)):
            state.opt_state.hyperparams["learning_rate"] = rate
            trainer.evaluate(state, batch_of(0))
            jaxddp.check_replicas(trainer, state)
            checkpoints.save(trainer, state)
            restored, _ = checkpoints.restore(trainer, make_params())
            assert restored.opt_state.hyperparams["learning_rate"] == rate
            program = trainer.compile(state, batch_of(0))
            state, _ = trainer.step(state, batch_of(0))
            assert trainer.compile(state, batch_of(0)) is program


def test_whole_owners_come_back_along_axes_in_any_order(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "replica"))
    trainer = make(jaxddp.zero1(shard="leaves"), mesh=mesh, axis=("replica", "data"))
    state, _ = trainer.step(trainer.init(make_params()), batch_of(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state)
        restored, _ = checkpoints.restore(trainer, make_params())
    one, other = (trainer.params(trainer.step(each, batch_of(1))[0]) for each in (restored, state))
    assert_same(one, other)


def test_a_model_state_that_a_checkpoint_lacks_or_has_otherwise_is_refused(tmp_path):
    def with_state(params, model_state, batch, key=None):
        return loss_fn(params, batch), {"count": model_state["count"] + 1}

    plain, stateful = make(jaxddp.naive(), 1), make(jaxddp.naive(), 1, loss_fn=with_state, has_state=True)
    params, scalar = make_params(), {"count": np.zeros(())}
    with Checkpoints(tmp_path / "without") as checkpoints:
        checkpoints.save(plain, plain.init(params))
        found = line_of(checkpoints.restore, stateful, params, model_state=scalar)
        assert "model_state.count is missing there and float64 () here" in found
    with Checkpoints(tmp_path / "with") as checkpoints:
        checkpoints.save(stateful, stateful.init(params, model_state={"count": np.ones(2)}))
        found = line_of(checkpoints.restore, stateful, params, model_state=scalar)
        assert "model_state.count is float64 (2,) there and float64 () here" in found
        state, _ = checkpoints.restore(plain, params)  # the model without its state
        assert jax.tree.leaves(state.model_state) == []
        found, model_state = checkpoints.restore_params(params, model_state={"count": np.zeros(2)})
        assert np.array_equal(model_state["count"], np.ones(2)) and found["w"].shape == (5, 8)
        assert checkpoints.restore_params(params, model_state={})[1] == {}
        found = line_of(checkpoints.restore_params, params, model_state={"mean": np.zeros(())})
        assert "model_state.mean is missing there and float64 () here" in found


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints of steps 1 and 2."""
    trainer = trainer_of("zero1 on 4")
    state = trainer.init(make_params())
    with Checkpoints(tmp_path) as checkpoints:
        for position in (0, BATCH):
            state, _ = trainer.step(state, batch_of(position))
            checkpoints.save(trainer, state, data_position=position + BATCH)
    return tmp_path


def files_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refusal(folder, trainer=None, params=None, **options):
    """Why a checkpoint is not restored, in one line; nothing in the folder changes."""
    before = files_of(folder)
    with Checkpoints(folder) as checkpoints:
        line = line_of(checkpoints.restore, trainer or trainer_of("naive on 1"), params or make_params(), **options)
    assert files_of(folder) == before
    return line


def test_another_model_or_optimizer_is_named_by_its_first_leaf_that_differs(saved):
    params, start = make_params(), f"checkpoint of step 2 in {str(saved)!r} is of another "
    for changed, difference in (
        (params | {"stack": jnp.zeros((3, 8, 8))}, "stack is float64 (2, 8, 8) there and float64 (3, 8, 8) here"),
        ({"new": jnp.zeros(3)} | params, "new is missing there and float64 (3,) here"),
        ({"b": params["b"]}, f"empty is float64 {(NUM_EMPTY, 3)} there and missing here"),
    ):
        assert refusal(saved, params=changed) == f"{start}model: params.{difference}"
    for optimizer, difference in (
        (optax.sgd(0.1), "0.count is int32 () there and missing here"),
        (optax.sgd(0.1, momentum=0.9), "0.trace.b is missing there and float64 (8,) here"),
    ):
        found = refusal(saved, make(jaxddp.bucketed(), 2, optimizer=optimizer))
        assert found == f"{start}optimizer: opt_state.{difference}"


@pytest.mark.parametrize(
    ("strategy", "shape"), [(jaxddp.zero3(min_shard_elements=0), (8, 5)), (jaxddp.bucketed(), (5, 9))]
)
def test_after_a_refused_restore_a_trainer_goes_on(saved, strategy, shape):
    trainer = make(strategy, 3)
    state = trainer.init(make_params())
    assert "is of another model: params.w" in refusal(saved, trainer, make_params() | {"w": jnp.zeros(shape)})
    state, _ = advance(trainer, state, 0, 2)
    assert_near(dict_of(trainer, state), uninterrupted(2))


def test_narrower_dtypes_are_refused_by_name_and_wider_ones_hold_what_was_saved(saved, tmp_path_factory):
    found = refusal(saved, RUNS["zero3 on 8"](), make_params(np.float32))
    assert found.endswith("has params.b in float64, of which float32 here would lose bits")
    narrow, wide = (make(jaxddp.zero1(), 2, optimizer=optax.adam(0.1, mu_dtype=one)) for one in ("float16", "float64"))
    folder = tmp_path_factory.mktemp("moments")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(wide, wide.init(make_params()))
        state, _ = checkpoints.restore(narrow, make_params())
    assert state.opt_state[0].mu["b"].dtype == np.float64  # until the next update
    assert narrow.step(state, batch_of(0))[0].opt_state[0].mu["b"].dtype == np.float16
    halves, trainer = make_params(jnp.bfloat16), make(jaxddp.bucketed(), 2, optimizer=optax.sgd(0.1))
    sharded = make(jaxddp.zero3(min_shard_elements=0), 3, optimizer=optax.sgd(0.1))
    folder = tmp_path_factory.mktemp("halves")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(trainer, trainer.init(halves))
        state, _ = checkpoints.restore(sharded, make_params(np.float32))
    for name, array in sharded.params(state).items():
        np.testing.assert_array_equal(array, halves[name].astype(np.float32))


def test_moments_that_an_update_makes_wider_come_back_as_wide(tmp_path):
    """Those of bfloat16 parameters are float32 once they were multiplied with a float32 hyperparameter."""
    adam = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(0.01)
    one, other = (make(strategy, 3, optimizer=adam) for strategy in (jaxddp.bucketed(), jaxddp.zero3()))
    state, _ = advance(one, one.init(make_params(jnp.bfloat16)), 0, 1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(one, state)
        restored, _ = checkpoints.restore(other, make_params(jnp.bfloat16))
    assert_same(dict_of(other, restored), dict_of(one, state))
    assert restored.opt_state.inner_state[0].mu["w"].dtype == np.float32
    other.step(restored, batch_of(0))


def test_a_learning_rate_that_was_set_to_a_whole_number_comes_back(tmp_path):
    trainer = make(jaxddp.zero1(), 2, optimizer=optax.inject_hyperparams(optax.adam)(0.01))
    state = trainer.init(make_params())
    state.opt_state.hyperparams["learning_rate"] = 1
    state, _ = advance(trainer, state, 0, 1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state)
        restored, _ = checkpoints.restore(trainer, make_params())
    assert restored.opt_state.hyperparams["learning_rate"] == 1
    assert_near(trainer.params(restored), trainer.params(state))
