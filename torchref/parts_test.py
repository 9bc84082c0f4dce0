"""A shard answers as the whole would, or refuses in one line that names it; so do the other wrappers' parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchref
from torchref.checkpoint.rank_state import RankState
from torchref.passes_test import model, optimizer_of, refused, wrap
from torchref.registry import make_training


class Reads(nn.Module):
    """A parent that reads a parameter of a child, outside of the child's forward."""

    def __init__(self, read):
        super().__init__()
        self.a, self.o, self.read = nn.Linear(3, 2), nn.Linear(3, 2), read

    def forward(self, x):
        return self.read(self, x)


class Swapped(nn.Module):
    """Uses two layers of equal shapes in an order that depends on the rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        first, second = (self.a, self.b) if x[0, 0] > 0 else (self.b, self.a)
        return second(torch.tanh(first(x)))


def rows():
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


READS = {
    "detach": lambda net, x: net.o(x) + net.a.bias.detach() + net.a(x),
    "linear": lambda net, x: F.linear(net.a(x), net.o.weight.T),
    "forward": lambda net, x: net.a.forward(x),
    "data": lambda net, x: net.a(x) @ net.o.weight.data,
    "penalty": lambda net, x: net.o(x) + net.a(x) + net.a.weight.square().sum(),
}


def reading():
    for name, read in READS.items():
        for has_grad in (False, True):
            net = torchref.FSDP(Reads(read).double())
            with torch.set_grad_enabled(has_grad):
                said = refused(lambda net=net: net(rows()), "shard_types")
            assert "'a." in said or "'o." in said, (name, has_grad)


def uses_of_a_shard():
    net = torchref.FSDP(nn.Linear(4, 2, dtype=torch.float64))
    weight, x = net.module.weight, torch.ones(1, 4, dtype=torch.float64)
    full = {"weight": torch.ones(2, 4, dtype=torch.float64)}
    uses = {
        "init": lambda: nn.init.normal_(weight),
        "reset": net.module.reset_parameters,
        "norm": lambda: weight.norm(),
        "index": lambda: torch.ones(4, 4)[(0, [weight])],
        "norm of detached": lambda: weight.detach().norm(),
        "sum of data": lambda: weight.data.sum(),
        "post-accumulate hook": lambda: weight.register_post_accumulate_grad_hook(print),
        "hook": lambda: weight.register_hook(print),
        "copy": lambda: copy.deepcopy(net.module),
        "state_dict": net.module.state_dict,
        "state_dict of the wrapper": net.state_dict,
        "gradient": lambda: torch.autograd.grad(net(x).sum(), list(net.parameters())),
        "functional": lambda: torch.func.functional_call(net.module, full, (x,)),
        "gradient of gradients": lambda: net(x).sum().backward(create_graph=True),
    }
    assert [name for name, use in uses.items() if not refused(use)] == []


def shapes_and_averages():
    """Number of dimensions, and a moving average kept as users do; all on shards."""
    net = torchref.FSDP(nn.Linear(4, 2))
    averages = [parameter.detach().clone() for parameter in net.parameters()]
    with torch.no_grad():
        for average, parameter in zip(averages, net.parameters(), strict=True):
            parameter.mul_(2)
            average.mul_(0.5).add_(parameter, alpha=0.5)
            average.lerp_(parameter.detach(), 0.5)
            factor = float((average / parameter.detach()).as_subclass(torch.Tensor).mean())
            assert abs(factor - 0.875) < 1e-6  # float32: the mean of 1.5 / 2 and of 1
    assert [parameter.dim() for parameter in net.parameters()] == [2, 1]
    assert {name: full.shape for name, full in net.gather_full_params().items()} == {"weight": (2, 4), "bias": (2,)}


def another_order():
    for differs in (False, True):
        net = torchref.FSDP(Swapped().double())
        x = rows() * (-1 if differs and dist.get_rank() else 1)
        said = refused(lambda net=net, x=x: (net(x).sum().backward(), net.finish_gradient_synchronization()))
        expected = "collective 0 of units (='all-gather of a' in rank 1) must be 'all-gather of b', as in"
        assert said.startswith(expected) if differs else said == ""


def an_optimizer_made_first():
    torch.manual_seed(0)
    module = nn.Linear(4, 2, dtype=torch.float64)
    alone = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, alone)]
    net = torchref.FSDP(module)
    for _ in range(3):
        for one, optimizer in zip((net, alone), optimizers, strict=True):
            optimizer.zero_grad()
            one(torch.ones(1, 4, dtype=torch.float64)).square().sum().backward()
            if one is net:
                net.finish_gradient_synchronization()
            optimizer.step()
    check_weights(net, alone)


def check_weights(net, alone):
    full = net.gather_full_params()
    for name, parameter in alone.named_parameters():
        assert (full[name] - parameter).abs().max() <= 1e-12  # float64: the order of sums


def check_a_step(net, forward, alone, step=None):
    step = step or optimizer_of(net).step
    forward(rows()[dist.get_rank() :: 2]).square().sum().backward()
    net.finish_gradient_synchronization()
    step()
    (alone(rows()).square().sum() / 2).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    check_weights(net, alone)


def halved(name):
    module, alone = model().double(), model().double()
    net = wrap(name, module)

    def halve(parameter):
        parameter.grad.data.mul_(0.5)

    for one in (module, alone):
        for parameter in one.parameters():
            register = parameter.register_post_accumulate_grad_hook
            if refused(lambda register=register: register(halve), "register_post_accumulate_grad_hook of '0.weight'"):
                assert name == "zero3"
                return
    check_a_step(net, net, alone)


def a_forward_hook_that_reads_a_weight():
    net = torchref.FSDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double())
    net.module[0].register_forward_hook(lambda module, _, output: output.data.add_(module.bias.data))
    assert "'0.bias'" in refused(lambda: net(rows()))


def wrapped_otherwise(name):
    """A scaler over shards, and an optimizer of the module beside the wrapper's own."""
    module = nn.Linear(3, 2)
    before = torch.optim.SGD(module.parameters(), lr=0.1)
    net = wrap(name, module)
    net(torch.ones(1, 3)).sum().backward()
    net.finish_gradient_synchronization()
    if net.owns_optimizer:
        assert refused(before.step)
    if net.owns_optimizer or name == "zero3":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        assert refused(lambda: scaler.step(net.optimizer if net.owns_optimizer else before))


def compiled():
    """Around the wrapper it is right, and within it is refused."""
    net = torchref.FSDP(model().double())
    check_a_step(net, torch.compile(net, backend="eager"), model().double())
    module = model().double()
    assert refused(lambda: torchref.FSDP(torch.compile(module, backend="eager")))
    module[0].compile(backend="eager")
    assert refused(lambda: torchref.FSDP(module))
    module = model().double()
    module[1].compile(backend="eager")  # of which nothing is sharded
    net = torchref.FSDP(module)
    check_a_step(net, net, model().double())


def compiled_steps():
    """Of optimizers whose steps communicate."""
    net = torchref.ZeRO1(model().double(), torch.optim.SGD, lr=0.1)
    check_a_step(net, net, model().double(), torch.compile(net.step, backend="eager"))
    net = torchref.BucketedDDP(model().double())
    sharded = torchref.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    check_a_step(net, net, model().double(), torch.compile(sharded.step, backend="eager"))


def compiled_with_microbatches():
    """By a trainer, which finds the wrapper in what is compiled; with a step of another optimizer in between."""
    x = torch.arange(12.0, dtype=torch.float64).cos().reshape(4, 3) * (dist.get_rank() + 1)
    for name in ("bucketed", "zero2"):
        ended = []
        for compile_ in (lambda one: one, lambda one: torch.compile(one, backend="eager")):
            net, tx = make_training(name, model().double(), torch.optim.SGD, {}, lr=0.1)
            taken = compile_(net)
            other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
            trainer = torchref.Trainer(
                lambda net, x: net(x).square().mean(), taken if net.owns_optimizer else tx, taken, num_microbatches=2
            )
            for _ in range(3):
                trainer.step(x)
            net(x).square().mean().backward()
            compile_(other.step)()
            ended.append((net.gather_full_params(), [*RankState.of(trainer).held()]))
        assert all(torch.equal(ended[0][0][one], ended[1][0][one]) for one in ended[0][0])
        assert ended[0][1] == ended[1][1]  # names in checkpoints


def gradients_of_gradients():
    """What meta-learning does: gradients are reduced without their graph."""
    net = torchref.ZeRO1(nn.Linear(3, 2), torch.optim.SGD, lr=0.1)
    net(torch.ones(1, 3)).sum().backward(create_graph=True)
    net.finish_gradient_synchronization()


CHECKS = (
    reading, uses_of_a_shard, shapes_and_averages, another_order, an_optimizer_made_first,
    a_forward_hook_that_reads_a_weight, gradients_of_gradients,
)  # fmt: skip
COMPILED = (compiled, compiled_steps, compiled_with_microbatches)


@pytest.mark.parametrize("check", [*CHECKS, *(pytest.param(check, marks=pytest.mark.full) for check in COMPILED)])
def test_a_shard_answers_as_the_whole_or_refuses(ranks, check):
    ranks.run(check, num_ranks=2)


@pytest.mark.parametrize("name", ["naive", "bucketed", "zero1", "zero2", "zero3"])
def test_hooks_on_parameters_come_before_the_reduction_or_are_refused(ranks, name):
    ranks.run(halved, name, num_ranks=2)


@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero3"])
def test_wrappers_refuse_what_they_cannot_do_in_one_line(ranks, name):
    ranks.run(wrapped_otherwise, name, num_ranks=2)
