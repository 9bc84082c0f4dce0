"""Units: full only while they are used, for any inputs and outputs, and under activation checkpointing."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchref
from torchref.communication.collectives import record
from torchref.communication.sharding import gather_whole
from torchref.parts import Shard

WIDTH = 32  # a weight has 4 KiB of float32, more than any activation here


class Swiglu(nn.Module):
    """A user-defined unit: direct parameters around another unit, keyword arguments, a dict in and out."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(2))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, x, *, scale, extra):
        hidden = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return {"y": F.linear(self.inner(hidden), self.down) * scale + extra["residual"], "count": 1}


class Model(nn.Module):
    """Layers that change their input in place, a user-defined unit, and a unit used twice."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
        self.swiglu = Swiglu()
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.twice(torch.tanh(self.twice(x)))

    def block(self, x):
        return self.swiglu(self.first(x), scale=2.0, extra={"residual": x})["y"]


def model(reentrant=None):
    torch.manual_seed(0)
    return Model(reentrant).double()


def tokens(rank):
    return (torch.arange(3) + rank) % 5


def wrap(module):
    return torchref.FSDP(module, shard_types=(nn.Linear, nn.Embedding, Swiglu))


# On the ranks


def gradients_are_those_of_one_process(reentrant):
    alone, net = model(), wrap(model(reentrant))
    with record() as issued:
        net(tokens(dist.get_rank())).square().sum().backward()
        net.finish_gradient_synchronization(denominator=1)
    for rank in range(net.num_ranks):
        alone(tokens(rank)).square().sum().backward()
    for parameter in net.parameters():
        parameter.data = parameter.grad
    found, kinds = net.gather_full_params(), [one.kind for one in issued]
    for name, parameter in alone.named_parameters():  # float64, gradients of order 100: the order of sums
        assert (found[name] - parameter.grad).abs().max() < 1e-11
    # Forward: embedding, first, swiglu, inner, twice (2); backward: the same less the embedding. A checkpoint gathers
    # the three units in it once more, to run them again.
    assert kinds.count("all-gather") == 6 + 5 + (0 if reentrant is None else 3)
    assert kinds.count("reduce-scatter") == 6


def saved_by_the_graph(reentrant):
    """The graph saves the same tensors with units as without, but for the weights; and units clean up."""
    net = wrap(model(reentrant))
    found = []
    for one in (net, model(reentrant)):
        kept = []

        def pack(tensor, kept=kept):
            kept.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = one(tokens(0))
        found.append(sorted(kept))
        assert all(type(parameter) is Shard for parameter in net.parameters())
        assert not any("weight" in module.__dict__ or "gate" in module.__dict__ for module in net.modules())
        output.sum().backward()
    assert not any(unit._again for unit in net._units)
    with_units, without = found
    weights = [num_bytes for num_bytes in without if num_bytes >= WIDTH * WIDTH * 8]
    assert len(weights) == (7 if reentrant is None else 2)  # outside of the checkpoint only one is used, twice
    assert with_units + weights == without


def first_layer():
    """The weight of a layer whose input needs no gradient is gathered once."""
    net = torchref.FSDP(nn.Linear(4, 4))
    counts = []
    for needs_gradient in (False, True):
        with record() as issued:
            net(torch.ones(1, 4).requires_grad_(needs_gradient)).sum().backward()
        counts.append([one.kind for one in issued].count("all-gather"))
        net.finish_gradient_synchronization()
        net.zero_grad()
    assert counts == [1, 2]


def frozen_layers():
    """Frozen units pass gradients on, get none and keep nothing gathered."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    module[1].requires_grad_(False)
    alone = copy.deepcopy(module)
    net = torchref.FSDP(module)
    x = torch.ones(1, 4, dtype=torch.float64)
    for one in (net, alone):
        one(x).square().sum().backward()
    assert net._units[1]._again is None
    net.finish_gradient_synchronization()
    assert module[1].weight.grad is None
    bias = alone[0].bias.grad.chunk(net.num_ranks)[dist.get_rank()]
    assert torch.allclose(module[0].bias.grad, bias, rtol=1e-12)  # float64: the order of sums


def twice_through_one_graph():
    net = torchref.FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double())
    total = net(torch.ones(1, 4, dtype=torch.float64)).square().sum()
    with net.no_sync():
        total.backward(retain_graph=True)
    total.backward()
    net.finish_gradient_synchronization()
    grads = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    net(torch.ones(1, 4, dtype=torch.float64)).square().sum().backward()
    net.finish_gradient_synchronization()
    assert all(torch.allclose(a, 2 * b.grad) for a, b in zip(grads, net.parameters(), strict=True))


def changed_before_the_backward():
    net = torchref.FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    total = net(torch.ones(1, 4)).sum()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match=r"shards of '1' were changed between the forward and its"):
        total.backward()


def gradients_of_inputs_alone():
    """What they gather again is dropped with them, and later changes of ``data`` are in the next gradients."""
    plain = model()
    net, x = torchref.FSDP(copy.deepcopy(plain)), torch.ones(3, WIDTH, dtype=torch.float64)
    x.requires_grad_()
    for one in (plain, net.module):
        torch.autograd.grad(one.twice(one.first(x)).sum(), x)
        for parameter in one.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        one.twice(one.first(x)).square().sum().backward()
    assert all(unit._again is None for unit in net._units)
    net.finish_gradient_synchronization()
    for name, parameter in plain.named_parameters():
        shard = net.module.get_parameter(name)
        if parameter.grad is not None:
            whole = gather_whole(shard.grad, shard.cut, None)
            torch.testing.assert_close(whole, parameter.grad, rtol=0, atol=1e-12)


class Clamps(nn.Linear):
    """Changes its own weight, which is dropped after the forward."""

    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def changed_in_the_forward():
    net = torchref.FSDP(Clamps(4, 4))
    with pytest.raises(RuntimeError, match="the forward of Clamps changed its gathered parameters"):
        net(torch.ones(1, 4))


def failing_forward():
    net = wrap(model())
    expected = net(tokens(0))
    with pytest.raises(RuntimeError):
        net.module.first(torch.ones(1, 3, dtype=torch.float64))
    with pytest.raises(TypeError):
        net.module.swiglu(torch.ones(1, WIDTH, dtype=torch.float64))
    assert all(not unit._uses for unit in net._units)
    assert "weight" not in net.module.first[0].__dict__
    assert torch.equal(net(tokens(0)), expected)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_equal_those_of_one_process(ranks, reentrant):
    ranks.run(gradients_are_those_of_one_process, reentrant, num_ranks=2)


@pytest.mark.parametrize("reentrant", [None, False])
def test_the_graph_saves_the_same_without_the_weights(ranks, reentrant):
    ranks.run(saved_by_the_graph, reentrant, num_ranks=2)


CORNERS = (
    first_layer, frozen_layers, twice_through_one_graph, changed_before_the_backward, gradients_of_inputs_alone,
    changed_in_the_forward, failing_forward,
)  # fmt: skip


@pytest.mark.parametrize("check", CORNERS)
def test_corners_of_units(ranks, check):
    ranks.run(check, num_ranks=2)
