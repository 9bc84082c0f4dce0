"""Both packages give each whole parameter to the same rank."""

import jax
import jax.numpy as jnp
import optax
import torch
from torch import nn

import torchref
from jaxddp.zero.owners import LeafOwners

SHAPES = ((8, 8), (30,), (8, 8), (5, 7), (64, 3), (1,), (0,), (8, 8), (11, 11), (30,))


def owners_in_torch():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = torchref.ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.1)
    return [optimizer.owner[parameter] for parameter in parameters]


def test_owners_are_equal(ranks):
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    expected = list(LeafOwners(optax.adamw(0.1), params, 3).owners.values())
    assert ranks.run(owners_in_torch, num_ranks=3) == [expected] * 3
    assert set(expected) == {0, 1, 2}
