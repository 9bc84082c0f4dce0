"""PyTorch's tensors and the batches of its ``DataLoader`` are batches of a trainer, as NumPy's arrays are."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import jaxddp
from jaxddp.comparison_test import refusal, trained

X = np.random.default_rng(0).normal(size=(20, 3)).astype("f4")
LABELS = np.arange(20)


def loss_fn(params, batch):
    x, labels = batch
    return jnp.mean((x.astype(jnp.float32) @ params["w"] - labels[:, None]) ** 2)


def make_trainer():
    return jaxddp.Trainer(loss_fn, optax.sgd(0.01), jaxddp.zero1(), jaxddp.data_mesh(4))


def weights_after(batches):
    trainer = make_trainer()
    state, _ = trained(trainer, trainer.init({"w": jnp.ones((3, 1))}), batches)
    return np.asarray(trainer.params(state)["w"])


def test_a_data_loader_feeds_training_and_evaluation():
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(LABELS)), batch_size=8)
    trainer = make_trainer()
    expected = weights_after([[X[:8], LABELS[:8]], [X[8:16], LABELS[8:16]], [X[16:], LABELS[16:]]])
    np.testing.assert_array_equal(weights_after(loader), expected)
    state = trainer.init({"w": jnp.ones((3, 1))})
    found = trainer.evaluate(state, loader, lambda params, batch: {"label": jaxddp.PerExample(batch[1])})
    np.testing.assert_array_equal(found["label"], LABELS)
    first = next(iter(loader))
    assert trainer.planned(state, first) == trainer.planned(state, [X[:8], LABELS[:8]])
    trainer.compile(state, first)
    programs = trainer.programs(state)
    assert programs.plan(state, first) == programs.plan(state, [X[:8], LABELS[:8]])
    assert "batch (={'': 'DataLoader'}) must be arrays" in refusal(trainer.step, state, loader)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.requires_grad_(), lambda x: x.t().contiguous().t(), lambda x: x[:, :]],
    ids=["requires_grad", "strided", "view"],
)
def test_tensors_of_any_kind(change):
    tensor = change(torch.from_numpy(X.copy())[:8])
    as_numpy = tensor.detach().numpy()
    np.testing.assert_array_equal(
        weights_after([(tensor, torch.from_numpy(LABELS[:8]))]), weights_after([(as_numpy, LABELS[:8])])
    )
