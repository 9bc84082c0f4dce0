"""What all strategies in ``ddp/`` guarantee; the first functions run on every rank of a pool."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication import collectives
from torchref.communication.collectives import record
from torchref.strategy import planned_collectives

OPTIONS = {"naive": {}, "flat": {}, "overlapped": {}, "bucketed": {"bucket_mb": 0.001}}
strategies = pytest.mark.parametrize("name", OPTIONS)


def wrap(name, module, **options):
    return torchref.make_strategy(name, module, **OPTIONS[name], **options)


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 5))


class Branches(nn.Module):
    """Two branches, of which a forward uses one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, x, branch):
        return getattr(self, branch)(x)


# On the ranks


def issued_and_planned(name):
    net = wrap(name, mlp())
    with record() as issued:
        net(torch.ones(2, 10)).sum().backward()
        during = len(issued)
        net.finish_gradient_synchronization()
    return [tuple(one) for one in issued], planned_collectives(net), during


def two_branches(name):
    net = wrap(name, Branches())
    branch = "left" if dist.get_rank() == 0 else "right"
    net(torch.ones(1, 3), branch).sum().backward()
    net.finish_gradient_synchronization()
    return {key: p.grad.tolist() for key, p in net.module.named_parameters()}


def second_backward(name):
    net = wrap(name, mlp())
    net(torch.ones(1, 10)).sum().backward()
    message = "the gradient of '.*' was computed twice: call finish_gradient_synchronization after each"
    with pytest.raises(RuntimeError, match=message):
        net(torch.ones(1, 10)).sum().backward()
    with pytest.raises(RuntimeError, match="the gradient of '.*' was changed while it was reduced"):
        net.finish_gradient_synchronization()  # the second has added to it
    net.zero_grad()
    net(torch.ones(1, 10)).sum().backward()
    net.finish_gradient_synchronization()


def discarding_a_backward(name):
    """Discards a backward and runs another, while the buffers of 8 MiB of the first are still in flight."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1448, 1448), nn.Linear(1448, 1448))
    net = torchref.make_strategy(name, module, **({"bucket_mb": None} if name == "bucketed" else {}))
    wrong = []
    for step in range(4):
        net(torch.full((4, 1448), float(step + 7))).sum().backward()  # never finished
        net.zero_grad()
        net.on_train_batch_start()
        net(torch.full((4, 1448), float(step + dist.get_rank()))).sum().backward()
        net.finish_gradient_synchronization()
        found = [p.grad.clone() for p in module.parameters()]
        grads = torch.autograd.grad(
            sum(module(torch.full((4, 1448), float(step + rank))).sum() for rank in range(2)) / 2, module.parameters()
        )
        wrong += [not torch.allclose(ours, full, rtol=1e-4) for ours, full in zip(found, grads, strict=True)]
    return wrong


def keeping_gradients_in_place(name):
    """With set_to_none=False, gradients stay views of the buffer and must not accumulate over steps."""
    net = wrap(name, mlp())
    found = []
    for step in range(3):
        net.zero_grad(set_to_none=False)
        net(torch.full((1, 10), float(step + dist.get_rank()))).sum().backward()
        net.finish_gradient_synchronization()
        found.append(net.module[0].weight.grad.clone())
    fresh = wrap(name, mlp())
    fresh(torch.full((1, 10), float(2 + dist.get_rank()))).sum().backward()
    fresh.finish_gradient_synchronization()
    return torch.equal(found[2], fresh.module[0].weight.grad)


def changed_after_wrapping(name):
    net = wrap(name, mlp())
    with pytest.raises(ValueError, match=r"parameter '0.weight' is already wrapped by a \w+DDP: delete that first"):
        wrap(name, nn.Sequential(*net.module))
    net(torch.ones(1, 10)).sum().backward()
    net.module[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="parameter '0.weight' was frozen after wrapping: wrap the module anew"):
        net.finish_gradient_synchronization()
    net.module[0].weight.requires_grad_(True)
    net.finish_gradient_synchronization()
    net.double()
    with pytest.raises(ValueError, match="parameter '.*' was replaced or turned into another dtype after wrapping"):
        net.finish_gradient_synchronization()
    sparse = wrap(name, nn.Embedding(4, 3, sparse=True))
    with pytest.raises(
        ValueError, match="the gradient of 'weight' has layout torch.sparse_coo: only dense gradients are"
    ):
        sparse(torch.tensor([0, 1])).sum().backward()
        sparse.finish_gradient_synchronization()


def nothing_survives_deletion(name):
    net = wrap(name, mlp())
    net(torch.ones(1, 10)).sum().backward()
    net.finish_gradient_synchronization()
    gone = [weakref.ref(net), weakref.ref(net.module[0].weight)]
    gc.disable()  # freed by counting alone: no cycle through a hook
    try:
        del net
        return [ref() is None for ref in gone]
    finally:
        gc.enable()


def without_communication(name):
    net = wrap(name, mlp())
    with record() as issued, collectives.silent():
        net(torch.full((1, 10), float(dist.get_rank()))).sum().backward()
        net.finish_gradient_synchronization(denominator=1)
    return len(issued) - len(planned_collectives(net)), net.module[0].weight.grad.abs().max().item()


def channels_last(name):
    """Gradients of such a convolution are not contiguous."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).double().to(memory_format=torch.channels_last)
    x = torch.full((2, 3, 8, 8), float(dist.get_rank()), dtype=torch.float64).to(memory_format=torch.channels_last)
    net = wrap(name, module)
    net(x).square().sum().backward()
    net.finish_gradient_synchronization()
    return [p.grad.clone() for p in module.parameters()]


def bad_input(name):
    frozen = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match=r"module \(=Sequential\) must have a parameter that needs a gradient"):
        wrap(name, frozen)
    with pytest.raises(ValueError, match="unknown strategy 'zero9': one of naive, flat, overlapped, bucketed"):
        torchref.make_strategy("zero9", mlp())
    with pytest.raises(ValueError, match=r"bucket_mb \(=0\) must be a positive number"):
        torchref.BucketedDDP(mlp(), 0)
    with pytest.raises(ValueError, match=r"bucket_mb \(=1\) and bucket_size_mb \(=None\) are one option: give one"):
        torchref.BucketedDDP(mlp(), 1, bucket_size_mb=None)


def older_name_of_the_cap(name):
    takes = {} if name == "bucketed" else {"optimizer_cls": torch.optim.SGD, "lr": 0.1}
    options = ({"bucket_mb": 0.001}, {"bucket_size_mb": 0.001})
    plans = [torchref.make_strategy(name, mlp(), **option, **takes).plan for option in options]
    return plans[0] == plans[1] and len(plans[0].buckets) > 1


# In the test process


@strategies
def test_issued_collectives_are_the_planned_ones(ranks, name):
    for issued, planned, during in ranks.run(issued_and_planned, name, num_ranks=2):
        assert issued == planned
        assert len(planned) == {"naive": 6, "flat": 1, "overlapped": 6, "bucketed": 3}[name]
        assert during == (0 if name in ("naive", "flat") else len(planned))


@strategies
def test_one_rank_communicates_nothing(ranks, name):
    assert ranks.run(issued_and_planned, name, num_ranks=1) == [([], [], 0)]


@strategies
def test_ranks_may_use_different_parameters(ranks, name):
    for found in ranks.run(two_branches, name, num_ranks=2):
        assert found == {"left.weight": [[0.5, 0.5, 0.5]], "right.weight": [[0.5, 0.5, 0.5]]}


def test_two_backward_passes_without_finishing_are_refused(ranks):
    for name in ("overlapped", "bucketed"):
        ranks.run(second_backward, name, num_ranks=2)


def test_an_unfinished_backward_can_be_discarded(ranks):
    for name in ("overlapped", "bucketed"):
        for wrong in ranks.run(discarding_a_backward, name, num_ranks=2):
            assert len(wrong) == 16
            assert not any(wrong)


@strategies
def test_changes_after_wrapping_are_refused(ranks, name):
    ranks.run(changed_after_wrapping, name, num_ranks=2)


@strategies
def test_gradients_may_stay_in_place(ranks, name):
    assert all(ranks.run(keeping_gradients_in_place, name, num_ranks=2))


@strategies
def test_a_deleted_wrapper_frees_everything(ranks, name):
    assert ranks.run(nothing_survives_deletion, name, num_ranks=2) == [[True, True]] * 2


@strategies
def test_without_communication_a_rank_keeps_its_own_gradients(ranks, name):
    (apart, first), (_, second) = ranks.run(without_communication, name, num_ranks=2)
    assert (apart, first) == (0, 0)  # the gradient of rank 0's zeros: nothing of rank 1's came
    assert second > 0


@strategies
def test_gradients_of_any_memory_format(ranks, name):
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).double()
    x = [torch.full((2, 3, 8, 8), float(rank), dtype=torch.float64) for rank in range(2)]
    (sum(alone(of_rank).square().sum() for of_rank in x) / 2).backward()
    for grads in ranks.run(channels_last, name, num_ranks=2):
        for grad, expected in zip(grads, alone.parameters(), strict=True):
            torch.testing.assert_close(grad, expected.grad, rtol=1e-12, atol=1e-12)  # float64: the order of sums


@strategies
def test_bad_input(ranks, name):
    ranks.run(bad_input, name, num_ranks=2)


@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero2"])
def test_bucket_size_mb_is_bucket_mb(ranks, name):
    assert all(ranks.run(older_name_of_the_cap, name, num_ranks=2))


def test_a_wrapper_needs_a_process_group():
    with pytest.raises(ValueError, match="NaiveDDP needs a process group: call torch.distributed.init_process_group"):
        torchref.NaiveDDP(mlp())
