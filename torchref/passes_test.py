"""Backward passes that are dropped, fail, are finished twice or never: right, or refused in one line."""

import pytest
import torch
import torch.distributed as dist

from torchref.late_parameters_test import model, wrap, wrappers

NUM_RANKS = 2


class Fails(torch.autograd.Function):
    """Passes on, and fails in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in the backward")


def rows(rank, i=0):
    return torch.linspace(-1, 1, 6).reshape(2, 3) * (rank + 1) + i


def loss(net, x):
    return net(x).square().sum()


def optimizer_of(name, net):
    return net if name.startswith("zero") and name != "zero3" else torch.optim.SGD(net.parameters(), lr=0.1)


def weights(name, net):
    if name == "zero3":
        return {key: tensor.tolist() for key, tensor in net.gather_full_params().items()}
    return {key: parameter.tolist() for key, parameter in net.module.named_parameters()}


def expected(*passes):
    """One step on one process, of the mean over ranks of the sum of some passes."""
    module = model()
    sum(loss(module, rows(rank, i)) / NUM_RANKS for i in passes for rank in range(NUM_RANKS)).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return {key: parameter.tolist() for key, parameter in module.named_parameters()}


# On the ranks


def steps_after(name, event, clear):
    net = wrap(name, model())
    tx, x = optimizer_of(name, net), rows(dist.get_rank())
    zero_grad = net.zero_grad if clear == "net" else tx.zero_grad
    if event == "dropped":  # such as that of a generator, through its critic
        loss(net, x + 5).backward()
    elif event == "dropped partly":
        with net.no_sync():
            loss(net, x + 5).backward()
    elif event == "failed":
        with pytest.raises(ZeroDivisionError):
            (net.module[2](Fails.apply(net.module[1](net.module[0](x + 5)))).sum()).backward()
    elif event == "failed late":
        with pytest.raises(ZeroDivisionError):
            loss(net, Fails.apply((x + 5).requires_grad_())).backward()
    zero_grad()
    loss(net, x).backward()
    net.finish_gradient_synchronization()
    tx.step()
    return weights(name, net)


def finish_after_each_of_two_passes(name):
    net = wrap(name, model())
    tx = optimizer_of(name, net)
    for i in range(2):
        loss(net, rows(dist.get_rank(), i)).backward()
        net.finish_gradient_synchronization()
    tx.step()
    return weights(name, net)


def finish_twice(name):
    net = wrap(name, model())
    tx = optimizer_of(name, net)
    loss(net, rows(dist.get_rank())).backward()
    net.finish_gradient_synchronization()
    try:
        net.finish_gradient_synchronization()
    except RuntimeError as error:
        return str(error)
    tx.step()
    return weights(name, net)


def finish_forgotten(name, no_sync, clear):
    net = wrap(name, model())
    tx, x = optimizer_of(name, net), rows(dist.get_rank())
    zero_grad = net.zero_grad if clear == "net" else tx.zero_grad
    try:
        for _ in range(2):
            zero_grad()
            if no_sync:
                with net.no_sync():
                    loss(net, x).backward()
            else:
                loss(net, x).backward()
            tx.step()
    except RuntimeError as error:
        return str(error)
    return ""


def cleared_before_finish(name, clear):
    net = wrap(name, model())
    tx = optimizer_of(name, net)
    loss(net, rows(dist.get_rank())).backward()
    (net.zero_grad if clear == "net" else tx.zero_grad)()
    net.finish_gradient_synchronization()
    tx.step()
    return weights(name, net)


def forward_between_backward_and_finish(name):
    """A look at the loss on the way is no pass of its own."""
    net = wrap(name, model())
    tx, x = optimizer_of(name, net), rows(dist.get_rank())
    loss(net, x).backward()
    loss(net, x)
    with torch.no_grad():
        loss(net, x)
    net.finish_gradient_synchronization()
    tx.step()
    return weights(name, net)


# Tests


def assert_close(found, right):
    for one in found:
        assert one.keys() == right.keys()
        for key in right:
            torch.testing.assert_close(torch.tensor(one[key]), torch.tensor(right[key]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clear", ["net", "optimizer"])
@pytest.mark.parametrize("event", ["dropped", "dropped partly", "failed", "failed late"])
@wrappers
def test_a_pass_that_is_dropped_leaves_nothing(ranks, name, event, clear):
    assert_close(ranks.run(steps_after, name, event, clear, num_ranks=NUM_RANKS), expected(0))


@wrappers
def test_gradients_that_are_finished_one_after_the_other_add_up(ranks, name):
    assert_close(ranks.run(finish_after_each_of_two_passes, name, num_ranks=NUM_RANKS), expected(0, 1))


@pytest.mark.parametrize("clear", ["net", "optimizer"])
@wrappers
def test_gradients_cleared_before_finish_do_not_come_back(ranks, name, clear):
    module = model()
    unchanged = {key: parameter.tolist() for key, parameter in module.named_parameters()}
    assert_close(ranks.run(cleared_before_finish, name, clear, num_ranks=NUM_RANKS), unchanged)


@wrappers
def test_finish_twice_is_refused(ranks, name):
    for message in ranks.run(finish_twice, name, num_ranks=NUM_RANKS):
        assert "finish_gradient_synchronization was called again without a backward" in message


@pytest.mark.parametrize("clear", ["net", "optimizer"])
@pytest.mark.parametrize("no_sync", [False, True])
@wrappers
def test_finish_forgotten_is_refused_at_the_next_forward_at_the_latest(ranks, name, no_sync, clear):
    for message in ranks.run(finish_forgotten, name, no_sync, clear, num_ranks=NUM_RANKS):
        assert "call finish_gradient_synchronization" in message


@wrappers
def test_a_forward_between_backward_and_finish_changes_nothing(ranks, name):
    assert_close(ranks.run(forward_between_backward_and_finish, name, num_ranks=NUM_RANKS), expected(0))
