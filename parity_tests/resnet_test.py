"""A small residual network with BatchNorm over a rank's own examples, in NNX and in PyTorch, under every strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
from flax import nnx
from torch import nn

import jaxddp
from jaxddp.checkpoint.interop import to_numpy
from jaxddp.comparison_test import compiled_as_planned
from jaxddp.flax import from_nnx
from torchref.interop import from_numpy
from torchref.registry import make_training
from torchref.train import local_rows

NUM_RANKS, NUM_STEPS, ROWS, CLASSES = 2, 4, 8, 3
WIDTHS = (4, 6)  # of the residual blocks; the second halves the image
OPTIMIZERS = {
    "momentum": (lambda: optax.sgd(0.05, momentum=0.9), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (lambda: optax.adamw(1e-2, weight_decay=0.01), torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.01}),
}
# A network of 11 layers: sums of at most 288 products each, rounded in another order; a wrong divisor is off by 1e-2.
TOLERANCE = 1e-12


class FlaxBlock(nnx.Module):
    def __init__(self, features, width, stride, options, norm):
        self.first = nnx.Conv(features, width, (3, 3), stride, padding=((1, 1), (1, 1)), use_bias=False, **options)
        self.second = nnx.Conv(width, width, (3, 3), padding=((1, 1), (1, 1)), use_bias=False, **options)
        self.short = nnx.Conv(features, width, (1, 1), stride, padding="VALID", use_bias=False, **options)
        self.first_norm, self.second_norm = norm(width), norm(width)

    def __call__(self, x):
        inner = nnx.relu(self.first_norm(self.first(x)))
        return nnx.relu(self.second_norm(self.second(inner)) + self.short(x))


class FlaxNet(nnx.Module):
    def __init__(self):
        options = {"rngs": nnx.Rngs(0), "dtype": jnp.float64, "param_dtype": jnp.float64}
        as_torchs = {"momentum": 0.9, "epsilon": 1e-5, "use_fast_variance": False}

        def norm(width):
            made = nnx.BatchNorm(width, **as_torchs, **options)
            made.mean, made.var = (nnx.BatchStat(array(width, jnp.float64)) for array in (jnp.zeros, jnp.ones))
            return made

        widths = (3, *WIDTHS)
        self.blocks = nnx.List([
            FlaxBlock(before, width, 1 + place, options, norm)
            for place, (before, width) in enumerate(zip(widths, WIDTHS, strict=False))
        ])  # fmt: skip
        self.head = nnx.Linear(WIDTHS[-1], CLASSES, **options)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class TorchBlock(nn.Module):
    def __init__(self, features, width, stride):
        super().__init__()
        self.first = nn.Conv2d(features, width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.short = nn.Conv2d(features, width, 1, stride, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(inner)) + self.short(x))


class TorchNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (3, *WIDTHS)
        self.blocks = nn.ModuleList(
            TorchBlock(before, width, 1 + place)
            for place, (before, width) in enumerate(zip(widths, WIDTHS, strict=False))
        )
        self.head = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def batches():
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(ROWS, 6, 6, 3)), "y": rng.integers(0, CLASSES, ROWS)} for _ in range(NUM_STEPS)]


def flax_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def torch_loss(net, batch):
    images = torch.from_numpy(np.ascontiguousarray(batch["x"].transpose(0, 3, 1, 2)))
    return nn.functional.cross_entropy(net(images), torch.from_numpy(batch["y"]))


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
        means = {
            f"blocks.{place}.{norm}.running_mean": np.asarray(getattr(block, norm).mean[...])
            for place, block in enumerate(model.blocks)
            for norm in ("first_norm", "second_norm")
        }
        return initial, to_numpy(trainer.params(state)) | means


def make_net(weights):
    net = TorchNet().double()
    buffers = {name: tensor for name, tensor in net.state_dict().items() if name not in weights}
    return from_numpy(weights | buffers, net)


def train_on_rank(name, options, optimizer, weights):
    _, optimizer_cls, hyper = OPTIMIZERS[optimizer]
    module = make_net(weights)
    net, steps = make_training(name, module, optimizer_cls, options, **hyper, foreach=False)
    for batch in batches():
        net.zero_grad()
        torch_loss(net, local_rows(batch, dist.get_rank(), NUM_RANKS)).backward()
        net.finish_gradient_synchronization()
        steps.step()
    found = net.gather_full_params() | {name: buffer for name, buffer in module.named_buffers() if "mean" in name}
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def check(ours, theirs, initial):
    assert sorted(ours) == sorted(theirs)
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=0, atol=TOLERANCE, err_msg=name)
        if name in initial:
            assert np.abs(array - initial[name]).max() > 1e-4, f"{name} stayed"


SHARDED = {"min_shard_elements": 0}
CASES = [
    ("naive", {}, {}), ("flat", {}, {}), ("overlapped", {}, {}), ("bucketed", {"bucket_mb": 1e-3}, {"bucket_mb": 1e-3}),
    ("zero1", {"bucket_mb": 1e-3}, {"bucket_mb": 1e-3}), ("zero2", {}, {}), ("zero3", SHARDED, {}),
]  # fmt: skip


IN_FULL = ("naive", "flat", "overlapped", "bucketed", "zero2")


@pytest.mark.parametrize(
    ("name", "options", "torch_options"),
    [pytest.param(*case, id=case[0], marks=pytest.mark.full if case[0] in IN_FULL else ()) for case in CASES],
)
def test_ranks_that_normalise_their_own_examples(ranks, name, options, torch_options):
    optimizer = "adamw" if name in ("zero1", "bucketed") else "momentum"
    initial, ours = train_in_jax(jaxddp.make_strategy(name, **options), optimizer)
    theirs = ranks.run(train_on_rank, name, torch_options, optimizer, initial, num_ranks=NUM_RANKS)
    check(ours, theirs[0], initial)
