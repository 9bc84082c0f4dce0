"""Compressed gradients: both packages have the same weights and state after every step."""

import jax
import jax.numpy as jnp
import jaxddp.communication.compression
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
from torch import nn

import jaxddp
import torchref
import torchref.communication.compression
from torchref.train import local_rows

NUM_STEPS = 8
SHAPES = {"up": (6, 16), "bias": (16,), "mix": (16, 12), "down": (12, 2)}
FACTORED = {"up", "mix"}  # where factors of rank 2 are smaller; "bias" and "down" are sent unfactored
STRATEGIES = {"naive": {}, "flat": {}, "overlapped": {}, "bucketed": {"bucket_mb": 1e-3}}


def initial():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) / 2 for name, shape in SHAPES.items()}


def batches(num_examples):
    rng = np.random.default_rng(1)
    return [
        {"x": rng.normal(size=(num_examples, 6)), "y": rng.normal(size=(num_examples, 2))} for _ in range(NUM_STEPS)
    ]


def predict(params, x, tanh):
    return tanh(tanh(x @ params["up"] + params["bias"]) @ params["mix"]) @ params["down"]


class Module(nn.Module):
    """The same names and shapes as in JAX: a Linear's weight is transposed, so it would be compressed differently."""

    def __init__(self):
        super().__init__()
        for name, value in initial().items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value)))

    def forward(self, x):
        return predict(dict(self.named_parameters()), x, torch.tanh)


def train_jax(strategy, how, num_ranks, num_microbatches):
    """Parameters after each step, and each rank's state."""
    with jax.enable_x64(True):
        trainer = jaxddp.Trainer(
            lambda params, batch: jnp.mean((predict(params, batch["x"], jnp.tanh) - batch["y"]) ** 2),
            optax.sgd(0.3),
            jaxddp.make_strategy(strategy, compression=how, **STRATEGIES[strategy]),
            jaxddp.data_mesh(num_ranks),
            num_microbatches=num_microbatches,
        )
        state, found = trainer.init(initial()), []
        for batch in batches(12 * num_ranks):
            state, _ = trainer.step(state, batch)
            found.append(jax.tree.map(np.array, (trainer.params(state), dict(state.memory))))
        return found


def train_torch(strategy, name, rank_of_factors, num_microbatches):
    """The same on a rank, with its own state only."""
    how = getattr(torchref.communication.compression, name)
    module = Module()
    net = torchref.make_strategy(
        strategy, module, compression=how(rank_of_factors) if rank_of_factors else how, **STRATEGIES[strategy]
    )
    trainer = torchref.Trainer(
        lambda net, batch: ((net(batch["x"]) - batch["y"]) ** 2).mean(),
        torch.optim.SGD(net.parameters(), lr=0.3, foreach=False),
        net,
        num_microbatches=num_microbatches,
    )
    found = []
    for batch in batches(12 * net.num_ranks):
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        trainer.step(local_rows(tensors, dist.get_rank(), net.num_ranks))
        params = {name: parameter.detach().numpy().copy() for name, parameter in module.named_parameters()}
        found.append((params, {name: tuple(part.numpy().copy() for part in one) for name, one in net.memory.items()}))
    return found


@pytest.mark.parametrize(
    "strategy, num_ranks, num_microbatches",
    [
        pytest.param("naive", 2, 1, marks=pytest.mark.full),
        ("flat", 3, 2),
        pytest.param("overlapped", 2, 2, marks=pytest.mark.full),
        ("bucketed", 3, 1),
    ],
)
def test_powersgd_is_the_same_step_for_step(ranks, strategy, num_ranks, num_microbatches):
    ours = train_jax(strategy, jaxddp.communication.compression.powersgd(2), num_ranks, num_microbatches)
    theirs = ranks.run(train_torch, strategy, "powersgd", 2, num_microbatches, num_ranks=num_ranks)
    for step, (params, memory) in enumerate(ours):
        assert set(memory) == FACTORED
        for rank, found in enumerate(theirs):
            assert set(found[step][1]) == FACTORED
            for name, value in found[step][0].items():
                # float64: sums in another order, which nearly parallel columns magnify in the bases.
                np.testing.assert_allclose(params[name], value, rtol=0, atol=1e-12)
            for name, of_rank in found[step][1].items():
                for part, expected in zip(memory[name], of_rank, strict=True):
                    np.testing.assert_allclose(part[rank], expected, rtol=0, atol=1e-12)
    assert all(np.abs(one.error).max() > 1e-3 for one in ours[-1][1].values())  # the compression was lossy


@pytest.mark.parametrize("name, rounding", [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_casts_are_the_same_up_to_how_sums_are_rounded(ranks, name, rounding):
    exact = train_jax("flat", jaxddp.communication.compression.none, 2, 1)
    ours = train_jax("flat", getattr(jaxddp.communication.compression, name), 2, 1)
    (theirs, _) = ranks.run(train_torch, "flat", name, None, 1, num_ranks=2)
    for key, initial_value in initial().items():
        # Gloo rounds each sum of two, XLA only the last: half of the last place of gradients, for each of two.
        moved = np.abs(exact[0][0][key] - initial_value).max()
        np.testing.assert_allclose(ours[0][0][key], theirs[0][0][key], rtol=0, atol=2 * rounding * moved)
        assert np.abs(ours[0][0][key] - exact[0][0][key]).max() > 0
