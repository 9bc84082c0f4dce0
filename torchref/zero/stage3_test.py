"""Stage 3: which parameters are sharded, in which dtypes, and what is refused."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchref
from torchref.communication.collectives import record
from torchref.communication.sharding import Cut
from torchref.passes_test import refused


class Tied(nn.Module):
    """An embedding and a head of one weight, around a normalisation that is replicated."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.RMSNorm(4, eps=1e-5), nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


class Functional(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.weight = other.weight

    def forward(self, x):
        return F.linear(x, self.weight)


def tied():
    torch.manual_seed(0)
    return Tied()


def backward(net, rank=None):
    tokens = (torch.arange(6) + (dist.get_rank() if rank is None else rank)) % 7
    net(tokens).float().logsumexp(-1).sum().backward()


# On the ranks


def shards_and_gradients(compute_dtype):
    """Differences from the shards of single-process gradients, and the collectives issued."""
    module = tied()
    expected = copy.deepcopy(module)
    net = torchref.FSDP(module, compute_dtype)
    starts = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with record() as issued:
        backward(net)
        net.finish_gradient_synchronization(denominator=1)
    for rank in range(net.num_ranks):
        backward(expected, rank)
    differences = {}
    for name, parameter in expected.named_parameters():

        def cut(whole, name=name):
            if "norm" in name:
                return whole
            return Cut(tuple(whole.shape), net.num_ranks).local_shard(whole, dist.get_rank())

        shard = module.get_parameter(name)
        assert torch.equal(starts[name], cut(parameter.detach()))
        assert shard.dtype == shard.grad.dtype == torch.float32
        assert shard.shape == shard.grad.shape == cut(parameter).shape
        assert shard.untyped_storage().nbytes() == shard.nbytes  # not a view of the full parameter
        apart = shard.grad.as_subclass(torch.Tensor) - cut(parameter.grad)
        differences[name] = (apart.norm() / parameter.grad.norm()).item()
    return differences, [tuple(one) for one in issued]


def own_types():
    """Only modules of the given types are sharded; a type may be the whole model's own, and the model one of them."""
    norm_only = {"embedding.weight": (7, 4), "norm.weight": (2,), "head.bias": (7,)}
    for net, expected in (
        (torchref.FSDP(tied(), shard_types=(nn.RMSNorm,)), norm_only),
        (torchref.FSDP(tied(), shard_types=(Tied, nn.RMSNorm)), norm_only),  # the model has none of its own
        (torchref.FSDP(tied(), shard_types=(nn.Module,)), norm_only | {"embedding.weight": (1, 14), "head.bias": (4,)}),
        (torchref.FSDP(nn.Linear(4, 6)), {"weight": (1, 12), "bias": (3,)}),
    ):
        assert {name: parameter.shape for name, parameter in net.module.named_parameters()} == expected
    assert list(net.gather_full_params()) == ["weight", "bias"]


def multihead_attention():
    """Its output layer is used without being called: it is of the attention, also where that computes in a dtype."""
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    module = nn.Sequential(attention, nn.Flatten(), nn.Linear(24, 4, dtype=torch.float64), nn.BatchNorm1d(4).double())
    x = torch.linspace(-9, 9, 96, dtype=torch.float64).view(4, 3, 8).cos()
    kinds = (nn.MultiheadAttention, nn.Linear)
    linear = ["0.linear1.weight", "0.linear1.bias", "0.linear2.weight", "0.linear2.bias", "2.weight", "2.bias"]
    own = [f"0.self_attn.{one}" for one in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")]
    # float64; torch's fast path, in evaluation, sums otherwise. bfloat16 has 8 bits, in some ten operations of up to 4.
    for dtype, types, atol in ((None, kinds[1:], 1e-12), (None, kinds, 1e-12), (torch.bfloat16, kinds[1:], 0.2)):
        alone = copy.deepcopy(module).to(torch.float32 if dtype else torch.float64)
        x = x.to(alone[2].weight.dtype)
        net = torchref.FSDP(copy.deepcopy(alone), dtype, types)
        parameters = net.module.named_parameters()
        sharded = [name for name, p in parameters if p.shape != alone.get_parameter(name).shape]
        assert sharded == (linear if types == kinds[1:] else own + linear)
        found, expected = net(x).to(x.dtype), alone(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)
        (found * x[:, 0, :4]).sum().backward()
        (expected * x[:, 0, :4]).sum().backward()
        net.finish_gradient_synchronization()
        for name, p in net.module.named_parameters():
            grad = alone.get_parameter(name).grad
            grad = Cut(tuple(grad.shape), 2).local_shard(grad, dist.get_rank()) if name in sharded else grad
            torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), grad, rtol=0, atol=atol)
        with torch.no_grad():
            torch.testing.assert_close(net.eval()(x).to(x.dtype), alone.eval()(x), rtol=0, atol=atol)


class Twice(nn.Module):
    """A matrix under two names, each of which is used, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.into = self.out = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3))
        self.fixed = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.needed_gradient = []

    def forward(self, x):
        self.needed_gradient.append(self.fixed.requires_grad)
        return torch.tanh(x @ self.into + self.fixed[:3]) @ self.out.T


def two_names_of_one_unit():
    x = torch.linspace(-2, 3, 20, dtype=torch.float64).view(5, 4)
    alone, module = Twice(), Twice()
    net = torchref.FSDP(module, shard_types=(Twice,))
    for model in (alone, net):
        (model(x) ** 2).sum().backward()
    net.finish_gradient_synchronization()
    grad = Cut((4, 3), 2).local_shard(alone.into.grad, dist.get_rank())
    torch.testing.assert_close(module.into.grad.as_subclass(torch.Tensor), grad, rtol=0, atol=1e-12)  # float64
    assert module.needed_gradient == [False]


class Conjugated(nn.Module):
    """Uses lazy views: torch saves one for the backward, and the gradient of ``phase`` is another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.complex128).view(4, 4) * (1 + 2j))
        self.phase = nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.complex128) * 1j)

    def forward(self, x):
        return (x @ self.weight.mH) * self.phase.conj()


def lazy_views():
    x = torch.linspace(-2, 3, 20, dtype=torch.complex128).view(5, 4)
    for wrap in (torchref.NaiveDDP, partial(torchref.FSDP, shard_types=(Conjugated,))):
        alone, module = (nn.Sequential(Conjugated(), Conjugated()) for _ in range(2))
        net = wrap(module)
        for model in (alone, net):
            model(x).abs().square().sum().backward()
        net.finish_gradient_synchronization()
        for name, p in module.named_parameters():
            grad = alone.get_parameter(name).grad
            grad = grad if p.shape == grad.shape else Cut(tuple(grad.shape), 2).local_shard(grad, dist.get_rank())
            torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), grad, rtol=1e-12, atol=0)  # float64


def bad_input():
    shared = nn.Sequential(linear := nn.Linear(4, 4), Functional(linear))
    for module, options, said in (
        (tied(), {"shard_types": (nn.Conv1d,)}, "module (=Tied) must have parameters in modules of shard_types (=Conv"),
        (shared, {}, "parameter '0.weight' is shared with a Functional, which is not sharded: add"),
        (nn.LSTM(2, 3), {"shard_types": (nn.LSTM,)}, "parameter 'weight_ih_l0' cannot be sharded: LSTM(2, 3) keeps"),
    ):
        assert refused(lambda module=module, options=options: torchref.FSDP(module, **options), said)
    net = torchref.FSDP(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=(0.1, 0.2)[dist.get_rank()])
    net(torch.ones(2, 3)).sum().backward()
    net.finish_gradient_synchronization()
    assert refused(optimizer.step, "lr of group 0 (=0.2 in rank 1) must be 0.1, as in rank 0")
    assert refused(lambda: net.module.load_state_dict({}), "load_state_dict of '' would load whole tensors")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_parameters_and_gradients_are_shards(ranks, num_ranks):
    for differences, _ in ranks.run(shards_and_gradients, None, num_ranks=num_ranks):
        assert max(differences.values()) < 1e-6  # float32: sums over ranks in another order


def test_computing_in_bfloat16_with_float32_shards(ranks):
    for differences, issued in ranks.run(shards_and_gradients, torch.bfloat16, num_ranks=2):
        # bfloat16 has 8 bits: a relative error of 2^-9 in each of some ten operations.
        assert 1e-4 < max(differences.values()) < 0.05
        gathers = [num_bytes for kind, num_bytes in issued if kind == "all-gather"]
        sums = [num_bytes for kind, num_bytes in issued if kind == "reduce-scatter"]
        # Embedding [7, 4]: 14 elements a rank; head with a bias of 7: 14 + 4. The embedding is not gathered again.
        assert gathers == [2 * 14 * 2, 2 * 18 * 2, 2 * 18 * 2]
        assert sums == [2 * 18 * 4, 2 * 14 * 4]
        assert ("all-reduce", 4 * 4) in issued


@pytest.mark.parametrize("check", [own_types, multihead_attention, two_names_of_one_unit, lazy_views, bad_input])
def test_what_is_sharded_replicated_and_refused(ranks, check):
    ranks.run(check, num_ranks=2)


def step_of_one_rank():
    """A pass on one rank is not finished, or is and another one comes after it."""
    for finishes in (False, True):
        net = torchref.FSDP(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 3)).sum().backward()
        if finishes:
            net.finish_gradient_synchronization()
            with net.no_sync():
                net(torch.ones(2, 3)).sum().backward()
        assert refused(optimizer.step, "gradients are of this rank alone: call finish_grad")


def test_one_rank_too_must_finish_its_gradients(ranks):
    ranks.run(step_of_one_rank, num_ranks=1)
