from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxddp
from jaxddp.flax import from_nnx

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


def torch_loss(net, batch):
    return torch.nn.functional.mse_loss(net(batch["x"]), batch["y"])


def test_every_strategy_and_torch_end_where_one_device_does():
    results = jaxddp.parity.check(
        loss_fn, optax.adamw(1e-2), PARAMS, BATCHES, num_ranks=(1, 2),
        torch=(Net(), torch_loss, partial(torch.optim.AdamW, lr=1e-2, weight_decay=1e-4)),
    )  # fmt: skip
    assert [(one.strategy, one.num_ranks) for one in results] == [
        *((name, count) for name in jaxddp.STRATEGIES for count in (1, 2)), ("PyTorch", 1),
    ]  # fmt: skip
    assert all(one.step is None and one.difference <= 1e-12 for one in results)
    assert results[0].difference == 0 or results[1].difference > 0  # they are measured


@pytest.mark.parametrize("kind", ["weighted", "aux"])
def test_losses_of_every_kind(kind):
    def of_kind(params, batch):
        if kind == "aux":
            return loss_fn(params, batch), {"mean": loss_fn(params, batch)}
        error = jnp.sum((batch["x"] @ params["up"]["kernel"]) ** 2, axis=1)
        used = batch["x"][:, 0] > 0  # another number on each rank
        return jaxddp.Weighted(jnp.sum(error * used), jnp.sum(used))

    (result,) = jaxddp.parity.check(of_kind, optax.sgd(0.1), PARAMS, BATCHES, strategies="bucketed", num_ranks=[2])
    assert result.difference <= 1e-12


def test_what_parts_is_shown_with_its_first_step_and_parameter():
    lossy = jaxddp.bucketed(hook=jaxddp.hooks.bf16)
    with pytest.raises(jaxddp.parity.ParityError) as caught:
        jaxddp.parity.check(loss_fn, optax.sgd(0.1), PARAMS, BATCHES, strategies=["naive", lossy], num_ranks=[2])
    lines = str(caught.value).splitlines()
    assert lines[0] == "1 of 2 trainings differ by more than 1e-12 from one device"
    assert lines[1].split("  ")[0] == "strategy" and lines[2].split()[:4] == ["bucketed", "2", "1", "down.bias"]
    naive, bucketed = caught.value.results
    assert naive.step is None and (bucketed.step, bucketed.leaf) == (1, "down.bias") and bucketed.difference > 1e-6

    other = (Net(), lambda net, batch: 2 * torch_loss(net, batch), partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(jaxddp.parity.ParityError, match=r"PyTorch +1 +1 +down.bias"):
        jaxddp.parity.check(loss_fn, optax.sgd(0.1), PARAMS, BATCHES, strategies=[], torch=other)


def test_options_of_the_trainer():
    options = {"num_microbatches": 2, "max_grad_norm": 0.1, "trainable": lambda name: not name.endswith("bias")}
    results = jaxddp.parity.check(loss_fn, optax.adamw(1e-2), PARAMS, BATCHES, num_ranks=[2], **options)
    assert all(one.difference <= 1e-12 and not one.refused for one in results)
    for one in results:
        assert np.all(one.params["up.bias"] == 0) and np.all(one.params["up.kernel"] != PARAMS["up"]["kernel"])
    unclipped = jaxddp.parity.check(loss_fn, optax.sgd(0.1), PARAMS, BATCHES, strategies=["naive"], num_ranks=[2])
    (whole,) = jaxddp.parity.check(
        loss_fn, optax.sgd(0.1), PARAMS, BATCHES, strategies=["naive"], num_ranks=[2], max_grad_norm=0.1
    )
    assert np.any(whole.params["up.kernel"] != unclipped[0].params["up.kernel"])


def test_torch_is_clipped_and_frozen_alike_and_an_unused_parameter_decays():
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Parameter(torch.ones(3))

    params = {**PARAMS, "spare": np.ones(3)}
    *_, found = jaxddp.parity.check(
        loss_fn, optax.adamw(1e-2), params, BATCHES, strategies="zero1", num_ranks=[2],
        max_grad_norm=0.1, trainable=lambda name: not name.endswith("bias"),
        torch=(Unused(), torch_loss, partial(torch.optim.AdamW, lr=1e-2, weight_decay=1e-4)),
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


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_model_with_state(has_aux):
    def loss(model, batch):
        square = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return (square, {"again": square}) if has_aux else square

    nnx_loss, params, model_state = from_nnx(Normalised("data"), loss, has_aux=has_aux)
    results = jaxddp.parity.check(
        nnx_loss, optax.adamw(1e-2), params, BATCHES, strategies=["naive", "zero3"], num_ranks=[2],
        model_state=model_state, torch=(TorchNormalised(), torch_loss, partial(torch.optim.AdamW, lr=1e-2, eps=1e-8,
                                                                               weight_decay=1e-4)),
    )  # fmt: skip
    assert [one.strategy for one in results] == ["naive", "zero3", "PyTorch"]
    assert np.all(results[0].params["model_state.norm.mean"] != 0)
    # Statistics of each rank's own examples are others.
    nnx_loss, params, model_state = from_nnx(Normalised(None), loss, has_aux=has_aux)
    with pytest.raises(jaxddp.parity.ParityError):
        jaxddp.parity.check(
            nnx_loss, optax.sgd(0.1), params, BATCHES, strategies="naive", num_ranks=[2], model_state=model_state
        )


def test_an_optimizer_that_wants_the_loss():
    results = jaxddp.parity.check(loss_fn, optax.polyak_sgd(0.1), PARAMS, BATCHES, strategies="bucketed", num_ranks=[2])
    assert results[0].difference <= 1e-12


def test_values_that_are_no_numbers_part():
    with pytest.raises(jaxddp.parity.ParityError, match="nan"):
        jaxddp.parity.check(
            loss_fn, optax.sgd(0.1), PARAMS, BATCHES, strategies=[],
            torch=(Net(), lambda net, batch: torch_loss(net, batch) * float("nan"), partial(torch.optim.SGD, lr=0.1)),
        )  # fmt: skip


def test_refusals_are_recorded_or_raised():
    results = jaxddp.parity.check(loss_fn, optax.lamb(1e-2), PARAMS, BATCHES[:1], num_ranks=[2])
    refused = {one.strategy: one.refused for one in results if one.refused}
    assert list(refused) == ["zero1", "zero2", "zero3"] and all("element" in why for why in refused.values())
    assert all(one.difference is None for one in results if one.refused)
    with pytest.raises(ValueError, match="element"):
        jaxddp.parity.check(loss_fn, optax.lamb(1e-2), PARAMS, BATCHES[:1], strategies="zero1", num_ranks=[2])
    odd = [{name: leaf[:6] for name, leaf in BATCHES[0].items()}]
    with pytest.raises(ValueError, match=r"^batch \(=6 examples\) must be divisible by .* \(=4 x 1\)$"):
        jaxddp.parity.check(loss_fn, optax.sgd(0.1), PARAMS, odd)
    unmarked = lambda params, batch: (loss_fn(params, batch), batch["x"])  # noqa: E731
    with pytest.raises(ValueError, match=r"^no strategy was compared: aux leaf .* must be marked"):
        jaxddp.parity.check(unmarked, optax.sgd(0.1), PARAMS, BATCHES[:1], num_ranks=[2])
    with pytest.raises(ValueError, match=r"^no strategy was compared: none was given$"):
        jaxddp.parity.check(loss_fn, optax.sgd(0.1), PARAMS, BATCHES[:1], strategies=[])
    with pytest.raises(ValueError, match=r"^batches \(=\[\]\) must be at least one$"):
        jaxddp.parity.check(loss_fn, optax.sgd(0.1), PARAMS, [])
