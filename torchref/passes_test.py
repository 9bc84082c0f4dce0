"""Backward passes that are dropped, fail, are finished twice or never: right, or refused in one line."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from torchref.late_parameters_test import WRAPPERS, model, wrap, wrappers

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


def finish_after_the_step(name, kind):
    net = wrap(name, model())
    parameters = list(net.parameters())
    tx = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    loss(net, rows(dist.get_rank())).backward()
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        if kind == "fused":
            tx.step()
        else:
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
        net.finish_gradient_synchronization()
    except RuntimeError as error:
        return str(error), all(torch.equal(old, new.detach()) for old, new in zip(before, parameters, strict=True))
    return "", False


def recomputed_twice_in_a_backward(name):
    """A forward that checkpointing repeats in the backward is no new pass."""
    net = wrap(name, model())
    tx, x = optimizer_of(name, net), rows(dist.get_rank())
    halves = [checkpoint(net, x[:1], use_reentrant=False), checkpoint(net, x[1:], use_reentrant=False)]
    sum(half.square().sum() for half in halves).backward()
    net.finish_gradient_synchronization()
    tx.step()
    return weights(name, net)


def quiet_pass_last(name):
    net = wrap(name, model())
    tx = optimizer_of(name, net)
    loss(net, rows(dist.get_rank())).backward()
    try:
        with net.no_sync():
            loss(net, rows(dist.get_rank(), 1)).backward()
        net.finish_gradient_synchronization()
    except RuntimeError as error:
        return str(error)
    tx.step()
    return weights(name, net)


def changed_before_finish(name, change):
    net = wrap(name, model())
    tx = optimizer_of(name, net)
    loss(net, rows(dist.get_rank())).backward()
    try:
        for parameter in list(net.parameters())[:2]:
            if change == "in place":
                parameter.grad.mul_(0)
            elif change == "replaced":
                parameter.grad = parameter.grad * 0
            else:
                parameter.grad = None
        net.finish_gradient_synchronization()
    except RuntimeError as error:
        return str(error)
    tx.step()
    return weights(name, net)


# Tests


def assert_close(found, right):
    for one in found:
        assert one.keys() == right.keys()
        for key in right:
            torch.testing.assert_close(torch.tensor(one[key]), torch.tensor(right[key]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("event", "clear"),
    [("dropped", "optimizer"), ("dropped partly", "net"), ("failed", "optimizer"), ("failed late", "net")],
)
@wrappers
def test_a_pass_that_is_dropped_leaves_nothing(ranks, name, event, clear):
    assert_close(ranks.run(steps_after, name, event, clear, num_ranks=NUM_RANKS), expected(0))


@wrappers
def test_gradients_that_are_finished_one_after_the_other_add_up(ranks, name):
    assert_close(ranks.run(finish_after_each_of_two_passes, name, num_ranks=NUM_RANKS), expected(0, 1))


@wrappers
def test_finish_twice_is_refused(ranks, name):
    for message in ranks.run(finish_twice, name, num_ranks=NUM_RANKS):
        assert "finish_gradient_synchronization was called again without a backward" in message


@pytest.mark.parametrize(("no_sync", "clear"), [(False, "net"), (True, "optimizer")])
@wrappers
def test_finish_forgotten_is_refused_at_the_next_forward_at_the_latest(ranks, name, no_sync, clear):
    for message in ranks.run(finish_forgotten, name, no_sync, clear, num_ranks=NUM_RANKS):
        assert "call finish_gradient_synchronization" in message


# ZeRO-2 frees local gradients as soon as they are reduced: nothing can step on them.
keeping_gradients = pytest.mark.parametrize("name", [name for name in WRAPPERS if not name.startswith("zero2")])


@pytest.mark.parametrize("kind", ["fused", "by hand"])
@keeping_gradients
def test_finish_after_the_step_is_refused(ranks, name, kind):
    for message, is_unchanged in ranks.run(finish_after_the_step, name, kind, num_ranks=NUM_RANKS):
        assert "call finish_gradient_synchronization" in message
        assert is_unchanged == (kind == "fused")


@wrappers
def test_a_quiet_pass_after_the_last_is_right_or_refused(ranks, name):
    for found in ranks.run(quiet_pass_last, name, num_ranks=NUM_RANKS):
        if name in ("naive", "flat", "zero3"):
            assert_close([found], expected(0, 1))
        else:
            assert "was computed twice" in found


@pytest.mark.parametrize("change", ["in place", "replaced", "cleared"])
@wrappers
def test_a_gradient_changed_before_finish_is_right_or_refused(ranks, name, change):
    module = model()
    right = expected(0) | {key: tensor.tolist() for key, tensor in list(module.named_parameters())[:2]}
    for found in ranks.run(changed_before_finish, name, change, num_ranks=NUM_RANKS):
        if name in ("naive", "flat", "zero3"):
            assert_close([found], right)
        else:
            assert "was changed while it was reduced" in found or "this gradient was reduced into" in found


@wrappers
def test_a_forward_that_is_recomputed_in_the_backward_is_no_new_pass(ranks, name):
    assert_close(ranks.run(recomputed_twice_in_a_backward, name, num_ranks=NUM_RANKS), expected(0))
