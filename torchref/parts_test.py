"""A shard answers as the whole would, or refuses in one line that names it; so do the other wrappers' parameters."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchref
from torchref.passes_test import WRAPPERS


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


def refused(use):
    """The message of a use that is refused."""
    try:
        use()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


READS = {
    "detach": lambda net, x: net.o(x) + net.a.bias.detach() + net.a(x),
    "linear": lambda net, x: F.linear(net.a(x), net.o.weight.T),
    "forward": lambda net, x: net.a.forward(x),
    "data": lambda net, x: net.a(x) @ net.o.weight.data,
    "penalty": lambda net, x: net.o(x) + net.a(x) + net.a.weight.square().sum(),
}


def reading():
    found = {}
    for name, read in READS.items():
        for has_grad in (False, True):
            net = torchref.FSDP(Reads(read).double())
            with torch.set_grad_enabled(has_grad):
                found[name, has_grad] = refused(lambda net=net: net(rows()))
    return found


def uses_of_a_shard():
    net = torchref.FSDP(nn.Linear(4, 2, dtype=torch.float64))
    weight, x = net.module.weight, torch.ones(1, 4, dtype=torch.float64)
    full = {"weight": torch.ones(2, 4, dtype=torch.float64)}
    uses = {
        "init": lambda: nn.init.normal_(weight),
        "reset": net.module.reset_parameters,
        "norm": lambda: weight.norm(),
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
    return {name: refused(use) for name, use in uses.items()}


def shapes_and_averages():
    """Number of dimensions, and a moving average kept as users do; all on shards."""
    net = torchref.FSDP(nn.Linear(4, 2))
    averages = [parameter.detach().clone() for parameter in net.parameters()]
    with torch.no_grad():
        for average, parameter in zip(averages, net.parameters(), strict=True):
            parameter.mul_(2)
            average.mul_(0.5).add_(parameter, alpha=0.5)
            average.lerp_(parameter.detach(), 0.5)
    pairs = zip(averages, net.parameters(), strict=True)
    factors = {float((average / parameter.detach()).as_subclass(torch.Tensor).mean()) for average, parameter in pairs}
    shapes = {name: tuple(full.shape) for name, full in net.gather_full_params().items()}
    return [parameter.dim() for parameter in net.parameters()], factors, shapes


def another_order(differs):
    torch.manual_seed(0)
    net = torchref.FSDP(Swapped().double())
    x = rows() * (-1 if differs and dist.get_rank() else 1)
    return refused(lambda: (net(x).sum().backward(), net.finish_gradient_synchronization()))


def optimizer_made_first(has_stepped):
    """A step of an optimizer made before wrapping, against one process."""
    torch.manual_seed(0)
    module = nn.Linear(4, 2, dtype=torch.float64)
    alone = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, alone)]
    if has_stepped:
        module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizers[0].step()
    net = torchref.FSDP(module)
    for _ in range(3):
        for one, optimizer in zip((net, alone), optimizers, strict=True):
            optimizer.zero_grad()
            one(torch.ones(1, 4, dtype=torch.float64)).square().sum().backward()
            if one is net:
                net.finish_gradient_synchronization()
            if said := refused(optimizer.step):
                return said
    full = net.gather_full_params()
    return max((full[name] - parameter).abs().max().item() for name, parameter in alone.named_parameters())


def difference_after_a_step(net, forward, alone):
    """The largest between the wrapper's weights and one process's."""
    tx = net if net.owns_optimizer else torch.optim.SGD(net.parameters(), lr=0.1)
    forward(rows()[dist.get_rank() :: 2]).square().sum().backward()
    net.finish_gradient_synchronization()
    tx.step()
    (alone(rows()).square().sum() / 2).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    full = net.gather_full_params()
    return max((full[name] - parameter).abs().max().item() for name, parameter in alone.named_parameters())


def halved(name):
    """Hooks on the parameters, put there after wrapping, halve each gradient; against one process."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    alone = copy.deepcopy(module)
    cls, options = WRAPPERS[name]
    net = cls(module, **options)

    def halve(parameter):
        parameter.grad.data.mul_(0.5)

    for one in (module, alone):
        for parameter in one.parameters():
            if said := refused(lambda parameter=parameter: parameter.register_post_accumulate_grad_hook(halve)):
                return said
    return difference_after_a_step(net, net, alone)


def forward_hooks():
    """Hooks that return nothing: one that does nothing, and one that reads a weight."""
    found = []
    for hook in (lambda *_: None, lambda module, _, output: output.data.add_(module.bias.data)):
        net = torchref.FSDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double())
        expected = net(rows())
        net.module[0].register_forward_hook(hook)
        found.append(refused(lambda net=net, expected=expected: torch.testing.assert_close(net(rows()), expected)))
    return found


def wrapped_otherwise(name):
    """Pickling, a scaler, and an optimizer of the module beside the wrapper's own."""
    cls, options = WRAPPERS[name]
    module = nn.Linear(3, 2)
    before = torch.optim.SGD(module.parameters(), lr=0.1)
    net = cls(module, **options)
    said = [refused(lambda: torch.save(net, io.BytesIO()))]
    net(torch.ones(1, 3)).sum().backward()
    net.finish_gradient_synchronization()
    if net.owns_optimizer:
        said.append(refused(before.step))
    if net.owns_optimizer or name == "zero3":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        said.append(refused(lambda: scaler.step(net if net.owns_optimizer else before)))
    return said


def compiled_in_each_way():
    return {way: compiled(way) for way in ("around", "within", "module.compile")}


def compiled(way):
    """Under torch.compile, one step against one process; or what is refused."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    alone = copy.deepcopy(module)
    if way == "module.compile":
        module.compile(backend="eager")
    if way != "around":
        return refused(lambda: torchref.FSDP(torch.compile(module, backend="eager") if way == "within" else module))
    net = torchref.FSDP(module)
    return difference_after_a_step(net, torch.compile(net, backend="eager"), alone)


def without_weights():
    """What meta-learning does, and a module without weights."""
    zero1 = torchref.ZeRO1(nn.Linear(3, 2), torch.optim.SGD, lr=0.1)
    zero1(torch.ones(1, 3)).sum().backward(create_graph=True)  # its gradients are reduced without their graph
    zero1.finish_gradient_synchronization()
    net = torchref.FSDP(nn.Linear(3, 2))
    changed = {name: torch.zeros(2, *shape) for name, shape in (("module.weight", (3,)), ("module.bias", ()))}
    return [
        refused(lambda: torch.func.functional_call(net, changed, (torch.ones(1, 3),))),
        refused(lambda: torch.autograd.grad(net(torch.ones(1, 3)).sum(), list(net.parameters()), create_graph=True)),
        refused(lambda: torchref.FSDP(nn.Linear(3, 2, device="meta"))),
    ]


# In the test process


def test_reading_a_parameter_outside_of_its_modules_forward_is_refused(ranks):
    for found in ranks.run(reading, num_ranks=2):
        for said in found.values():
            assert "shard_types" in said and ("'a." in said or "'o." in said) and "\n" not in said, found


def test_what_would_see_a_part_is_refused(ranks):
    for found in ranks.run(uses_of_a_shard, num_ranks=2):
        assert all(said and "\n" not in said for said in found.values()), found


def test_what_is_the_same_on_a_part_is_allowed(ranks):
    for dims, factors, shapes in ranks.run(shapes_and_averages, num_ranks=2):
        assert dims == [2, 1]
        assert all(abs(factor - 0.875) < 1e-6 for factor in factors)  # float32: the mean of 1.5 / 2 and of 1
        assert shapes == {"weight": (2, 4), "bias": (2,)}


def test_ranks_that_use_units_in_another_order_are_refused(ranks):
    assert ranks.run(another_order, False, num_ranks=2) == ["", ""]
    for said in ranks.run(another_order, True, num_ranks=2):
        assert said.startswith("collective 0 of units (='all-gather of a' in rank 1) must be 'all-gather of b', as in")


def test_an_optimizer_made_before_wrapping_trains(ranks):
    assert max(ranks.run(optimizer_made_first, False, num_ranks=2)) <= 1e-12  # float64: the order of sums
    for said in ranks.run(optimizer_made_first, True, num_ranks=2):
        assert "state 'exp_avg' of 'weight'" in said and "make the optimizer anew" in said


@pytest.mark.parametrize("name", ["naive", "bucketed", "zero1", "zero2", "zero3"])
def test_hooks_on_parameters_come_before_the_reduction_or_are_refused(ranks, name):
    for found in ranks.run(halved, name, num_ranks=2):
        if name == "zero3":
            assert "register_post_accumulate_grad_hook of '0.weight'" in found
        else:
            assert found <= 1e-12  # float64: the order of sums


def test_forward_hooks_that_return_nothing(ranks):
    for looked, read in ranks.run(forward_hooks, num_ranks=2):
        assert looked == "" and "'0.bias'" in read


@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero3"])
def test_wrappers_refuse_what_they_cannot_do_in_one_line(ranks, name):
    for said in ranks.run(wrapped_otherwise, name, num_ranks=2):
        assert all(one and "\n" not in one for one in said), said


def test_compiled_around_it_is_right_and_within_it_is_refused(ranks):
    for found in ranks.run(compiled_in_each_way, num_ranks=2):
        assert found.pop("around") <= 1e-12  # float64: the order of sums
        assert all("is compiled" in said and "\n" not in said for said in found.values())


def test_meta_learning_and_the_meta_device_are_refused_in_one_line(ranks):
    for said in ranks.run(without_weights, num_ranks=2):
        assert all(one and "\n" not in one for one in said), said
