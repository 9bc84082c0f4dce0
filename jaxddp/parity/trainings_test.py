from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxddp
from jaxddp.comparison_test import refusal
from jaxddp.flax import from_nnx
from jaxddp.parity import ParityError, check
from jaxddp.parity.step import difference
from jaxddp.training.replicas_test import on_rank

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
PARAMS = {
    "up": {"kernel": RNG.normal(size=(3, 5)).astype("float32"), "bias": np.zeros(5, "float32")},
    "down": {"kernel": RNG.normal(size=(5, 2)).astype("float32"), "bias": np.zeros(2, "float32")},
}
BATCHES = [{"x": RNG.normal(size=(8, 3)), "y": RNG.normal(size=(8, 2))} for _ in range(3)]


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((hidden @ params["down"]["kernel"] + params["down"]["bias"] - batch["y"]) ** 2)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


TORCH_ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=1e-4)


def torch_loss(net, batch):
    return torch.nn.functional.mse_loss(net(batch["x"]), batch["y"])


def test_every_strategy_and_torch_end_where_one_device_does():
    torch_one = (Net(), torch_loss, TORCH_ADAMW)
    results = check(loss_fn, optax.adamw(1e-2), PARAMS, BATCHES, num_ranks=[2], torch=torch_one)
    named = [*((name, 2) for name in jaxddp.STRATEGIES), ("PyTorch", 1)]
    assert [(one.strategy, one.num_ranks) for one in results] == named
    assert all(one.step is None and one.difference <= 1e-12 for one in results)
    assert any(one.difference > 0 for one in results)  # they are measured


def with_aux(params, batch):
    return loss_fn(params, batch), {"mean": loss_fn(params, batch)}


def weighted(params, batch):
    error = jnp.sum((batch["x"] @ params["up"]["kernel"]) ** 2, axis=1)
    used = batch["x"][:, 0] > 0  # another number on each rank
    return jaxddp.Weighted(jnp.sum(error * used), jnp.sum(used))


@pytest.mark.parametrize(
    ("loss", "optimizer"),
    [(weighted, optax.sgd(0.1)), (with_aux, optax.sgd(0.1)), (loss_fn, optax.polyak_sgd(0.1))],
    ids=["weighted", "aux", "the optimizer wants the loss"],
)
def test_losses_of_every_kind(loss, optimizer):
    (result,) = check(loss, optimizer, PARAMS, BATCHES, strategies="bucketed", num_ranks=[2])
    assert result.difference <= 1e-12


@pytest.mark.parametrize("params", [namedtuple("Head", "scale value")(np.ones(3), np.ones((4, 3))), np.ones((4, 3))])
def test_parameters_that_are_no_dictionary(params):  # Flax's variables hold their array as their value
    def loss_fn(params, batch):
        return sum(jnp.mean((batch["x"] @ leaf.T) ** 2) for leaf in jax.tree.leaves(params))

    check(loss_fn, optax.adamw(0.1), params, BATCHES, strategies=["zero1"], num_ranks=2)


def test_what_parts_is_shown_with_its_first_step_and_parameter():
    lossy = jaxddp.bucketed(hook=jaxddp.hooks.bf16)
    with pytest.raises(ParityError) as caught:
        check(loss_fn, optax.sgd(0.1), PARAMS, BATCHES, strategies=["naive", lossy], num_ranks=[2])
    first, line = str(caught.value).splitlines()
    assert first == "1 of 2 trainings differ by more than 1e-12 from one device"
    assert line.startswith("<bucketed on 2: ") and line.endswith(" apart, first in step 1 at down.bias>")
    naive, bucketed = caught.value.results
    assert naive.step is None and (bucketed.step, bucketed.leaf) == (1, "down.bias") and bucketed.difference > 1e-6

    other = (Net(), lambda net, batch: 2 * torch_loss(net, batch), partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ParityError, match=r"PyTorch on 1: .* in step 1 at down.bias>"):
        check(loss_fn, optax.sgd(0.1), PARAMS, BATCHES, strategies=[], torch=other)
    no_number = (Net(), lambda net, batch: torch_loss(net, batch) * float("nan"), partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ParityError, match="nan"):
        check(loss_fn, optax.sgd(0.1), PARAMS, BATCHES, strategies=[], torch=no_number)


def test_options_of_the_trainer():
    options = {"num_microbatches": 4, "max_grad_norm": 0.1, "trainable": lambda name: not name.endswith("bias")}
    options |= {"strategies": ["naive", "bucketed", "overlapped", "zero2", "zero3"]}
    results = check(loss_fn, optax.adamw(1e-2), PARAMS, BATCHES, num_ranks=[2], **options)
    assert all(one.difference <= 1e-12 and not one.refused for one in results)
    for one in results:
        assert np.all(one.params["up.bias"] == 0) and np.all(one.params["up.kernel"] != PARAMS["up"]["kernel"])


def test_torch_is_clipped_and_frozen_alike_and_an_unused_parameter_decays():
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Parameter(torch.ones(3))

    params = {**PARAMS, "spare": np.ones(3)}
    *_, found = check(
        loss_fn, optax.adamw(1e-2), params, BATCHES, strategies="zero1", num_ranks=[2],
        max_grad_norm=0.1, trainable=lambda name: not name.endswith("bias"), torch=(Unused(), torch_loss, TORCH_ADAMW),
    )  # fmt: skip
    assert found.strategy == "PyTorch" and np.all(found.params["up.bias"] == 0) and np.all(found.params["spare"] < 1)


class Normalised(nnx.Module):
    def __init__(self, axis_name):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(3, 5, use_bias=False, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(5, axis_name=axis_name, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.norm(self.up(x))))


class TorchNormalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 2)
        self.norm = torch.nn.BatchNorm1d(5)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def test_a_model_with_state():
    def loss(model, batch):
        square = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return square, {"again": square}

    nnx_loss, params, model_state = from_nnx(Normalised("data"), loss, has_aux=True)
    results = check(
        nnx_loss, optax.adamw(1e-2), params, BATCHES, strategies=["naive", "zero3"], num_ranks=[2],
        model_state=model_state, torch=(TorchNormalised(), torch_loss, TORCH_ADAMW),
    )  # fmt: skip
    assert [one.strategy for one in results] == ["naive", "zero3", "PyTorch"]
    assert np.all(results[0].params["model_state.norm.mean"] != 0)
    # Statistics of each rank's own examples are others.
    nnx_loss, params, model_state = from_nnx(Normalised(None), loss, has_aux=True)
    with pytest.raises(ParityError):
        check(nnx_loss, optax.sgd(0.1), params, BATCHES, strategies="naive", num_ranks=[2], model_state=model_state)


def test_refusals_are_recorded_or_raised():
    results = check(loss_fn, optax.lamb(1e-2), PARAMS, BATCHES, num_ranks=[2])
    refused = {one.strategy: one.refused for one in results if one.refused}
    assert list(refused) == ["zero1", "zero2", "zero3"] and all("element" in why for why in refused.values())
    assert all(one.difference is None for one in results if one.refused)
    assert "element" in refusal(check, loss_fn, optax.lamb(1e-2), PARAMS, BATCHES, strategies="zero1", num_ranks=[2])
    assert repr(results[4]).startswith("<zero1 on 2: refused, ") and len(repr(results[0])) < 40
    odd = [{name: leaf[:6] for name, leaf in batch.items()} for batch in BATCHES]
    for batches, value in [
        (odd, "batch (=6 examples) must be divisible by "),
        (BATCHES[:1], "batches (=1)"),
    ]:
        assert value in refusal(check, loss_fn, optax.sgd(0.1), PARAMS, batches)
    assert "'step' has dtype int32" in refusal(check, loss_fn, optax.sgd(0.1), PARAMS | {"step": np.int32(0)}, BATCHES)


def test_a_comparison_in_which_nothing_moves_is_none():
    for loss, rate in ((lambda params, batch: jnp.mean(batch["x"]), 0.1), (loss_fn, 0.0)):
        assert "move" in refusal(check, loss, optax.sgd(rate), PARAMS, BATCHES, num_ranks=[2])


# Mistakes that must be found, each put into what strategies call


def parted(strategy, loss_fn=loss_fn, **options):
    with pytest.raises(ParityError) as caught:
        check(loss_fn, optax.adam(0.1), PARAMS, BATCHES, strategies=strategy, num_ranks=[2], **options)
    (result,) = caught.value.results
    return result


def gathers_zeros(monkeypatch):
    gather = lax.all_gather
    monkeypatch.setattr(lax, "all_gather", lambda *args, **options: jnp.zeros_like(gather(*args, **options)))


def only_first_bucket(monkeypatch):
    scatter, calls = lax.psum_scatter, []

    def forget(x, axis, **options):
        calls.append(x)
        found = scatter(x, axis, **options)
        return found if len(calls) == 1 else jnp.zeros_like(found)

    monkeypatch.setattr(lax, "psum_scatter", forget)


@pytest.mark.parametrize(
    ("mistake", "strategy"), [(gathers_zeros, "zero3"), (gathers_zeros, "zero1"), (only_first_bucket, "zero2")]
)
def test_a_mistake_in_a_part_that_small_models_might_not_use_is_found(monkeypatch, mistake, strategy):
    mistake(monkeypatch)
    assert parted(strategy).step == 1


def after_each_step(monkeypatch, change):
    step = jaxddp.Trainer.step

    def changed(*args):
        state, metrics = step(*args)
        return change(state), metrics

    monkeypatch.setattr(jaxddp.Trainer, "step", changed)


def test_a_copy_that_is_wrong_on_the_second_rank_alone_is_found(monkeypatch):
    def add_one(leaf):
        return on_rank(leaf, 1, lambda copy: copy + 1)

    after_each_step(monkeypatch, lambda state: state._replace(params=jax.tree.map(add_one, state.params)))
    result = parted("flat")
    assert (result.step, result.leaf, result.difference) == (1, "copies of down.bias", np.inf)


def test_lost_optimizer_state_is_found_before_it_changes_a_parameter(monkeypatch):
    lose = lambda state: state._replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))  # noqa: E731
    after_each_step(monkeypatch, lose)
    result = parted("zero1")
    assert result.step == 1 and result.leaf.startswith("opt_state.")


def test_aux_values_and_complex_model_state_are_compared():
    def largest(params, batch):
        return loss_fn(params, batch), {"largest": jnp.max(batch["x"])}  # of a rank's examples, then averaged

    def counted(params, model_state, batch):
        return loss_fn(params, batch), {"count": model_state["count"] + 1j * len(batch["x"])}

    assert parted("flat", largest).leaf == "metrics.aux.largest"
    assert parted("flat", counted, model_state={"count": np.zeros((), "complex64")}).leaf == "model_state.count"


def test_a_mistake_that_raises_is_not_a_refusal(monkeypatch):
    def fail(*args, **options):
        raise ValueError("cannot reshape")

    monkeypatch.setattr(jaxddp.Trainer, "init", fail)
    assert "cannot reshape" in refusal(check, loss_fn, optax.sgd(0.1), PARAMS, BATCHES, num_ranks=[2])


def test_two_infinities_are_the_same():
    right = np.array([1.0, -np.inf, 4.0])
    assert difference(right + [1e-3, 0, 0], right) == pytest.approx(2.5e-4)
    assert difference(np.array([1.0, np.inf, 4.0]), right) == np.inf and np.isnan(
        difference(right * [np.nan, 1, 1], right)
    )
