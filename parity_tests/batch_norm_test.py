"""A network with BatchNorm over a rank's own examples, in NNX and in PyTorch, under every strategy."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn

import jaxddp
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.comparison_test import compiled_as_planned, mostly_full
from jaxddp.flax import from_nnx
from torchref.interop import from_numpy

from .torch_side import train_module_on_rank

NUM_RANKS, NUM_STEPS, ROWS, CLASSES, WIDTH = 2, 4, 8, 3, 4
OPTIMIZERS = {
    "momentum": (lambda: optax.sgd(0.05, momentum=0.9), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (lambda: optax.adamw(1e-2, weight_decay=0.01), torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.01}),
}
TOLERANCE = 1e-12  # sums of at most 288 products each, rounded in another order; a wrong divisor is off by 1e-2


class FlaxNet(nnx.Module):
    def __init__(self):
        options = {"rngs": nnx.Rngs(0), "dtype": jnp.float64, "param_dtype": jnp.float64}
        self.conv = nnx.Conv(3, WIDTH, (3, 3), padding=((1, 1), (1, 1)), use_bias=False, **options)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, epsilon=1e-5, use_fast_variance=False, **options)
        self.norm.mean, self.norm.var = (nnx.BatchStat(make(WIDTH, jnp.float64)) for make in (jnp.zeros, jnp.ones))
        self.head = nnx.Linear(WIDTH, CLASSES, **options)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean(axis=(1, 2)))


def torch_net():
    conv, norm = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
    pool, flat, head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(OrderedDict(conv=conv, norm=norm, relu=nn.ReLU(), pool=pool, flat=flat, head=head)).double()


def batches():
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(ROWS, 6, 6, 3)), "y": rng.integers(0, CLASSES, ROWS)} for _ in range(NUM_STEPS)]


def flax_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def train_in_jax(strategy, optimizer):
    """Initial and trained weights and running means, by torch name."""
    with jax.enable_x64(True):
        model = FlaxNet()
        loss_fn, params, model_state = from_nnx(model, flax_loss)
        tx, mesh = OPTIMIZERS[optimizer][0](), jaxddp.data_mesh(NUM_RANKS)
        trainer = jaxddp.Trainer(loss_fn, tx, strategy, mesh, has_state=True, state_sync="first")
        initial = to_numpy(params)
        state = trainer.init(params, model_state=model_state)
        compiled_as_planned(trainer, state, batches()[0])
        for batch in batches():
            state, _ = jax.block_until_ready(trainer.step(state, batch))
        nnx.update(model, trainer.params(state), trainer.model_state(state))
        means = {"norm.running_mean": np.asarray(model.norm.mean[...])}
        return initial, to_numpy(trainer.params(state)) | means


SHARDED = {"min_shard_elements": 0}
CASES = [
    ("naive", {}, {}), ("flat", {}, {}), ("overlapped", {}, {}), ("bucketed", {"bucket_mb": 1e-3}, {"bucket_mb": 1e-3}),
    ("zero1", {"bucket_mb": 1e-3}, {"bucket_mb": 1e-3}), ("zero2", {}, {}), ("zero3", SHARDED, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "torch_options"), mostly_full((CASES[4], CASES[6]), CASES))
def test_ranks_that_normalise_their_own_examples(ranks, name, options, torch_options):
    optimizer = "adamw" if name in ("zero1", "bucketed") else "momentum"
    initial, ours = train_in_jax(jaxddp.make_strategy(name, **options), optimizer)
    net, (_, optimizer_cls, hyper) = torch_net(), OPTIMIZERS[optimizer]
    buffers = {name: tensor for name, tensor in net.state_dict().items() if name not in initial}
    steps = optimizer_cls, hyper | {"foreach": False}
    images = [batch | {"x": np.ascontiguousarray(batch["x"].transpose(0, 3, 1, 2))} for batch in batches()]
    net = from_numpy(initial | buffers, net)
    theirs = ranks.run(train_module_on_rank, name, net, steps, torch_options, images, num_ranks=NUM_RANKS)[0]
    assert sorted(ours) == sorted(theirs)
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=0, atol=TOLERANCE, err_msg=name)
        if name in initial:
            assert np.abs(array - initial[name]).max() > 1e-4, f"{name} stayed"
