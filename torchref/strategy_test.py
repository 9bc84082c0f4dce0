"""What all strategies in ``ddp.py`` guarantee; each is checked on the ranks of a pool, in one start."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication.collectives import record

OPTIONS = {"naive": {}, "flat": {}, "overlapped": {}, "bucketed": {"bucket_mb": 0.001}}


def wrap(name, module, **options):
    return torchref.make_strategy(name, module, **OPTIONS[name], **options)


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 5))


# On the ranks


def issued_collectives_are_the_planned_ones(name):
    net = wrap(name, mlp())
    with record() as issued:
        net(torch.ones(2, 10)).sum().backward()
        during = len(issued)
        net.finish_gradient_synchronization()
    planned = net.planned_collectives()
    assert [tuple(one) for one in issued] == planned
    is_alone = net.num_ranks == 1  # which communicates nothing
    assert len(planned) == (0 if is_alone else {"naive": 6, "flat": 1, "overlapped": 6, "bucketed": 3}[name])
    assert during == (0 if name in ("naive", "flat") else len(planned))


def a_backward_is_discarded_while_it_is_in_flight(name):
    """Runs another one, while the buffers of 8 MiB of the first are still on their way."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1448, 1448), nn.Linear(1448, 1448))
    net = torchref.make_strategy(name, module)
    for step in range(2):
        net(torch.full((4, 1448), float(step + 7))).sum().backward()  # never finished
        net.zero_grad()
        net.on_train_batch_start()
        net(torch.full((4, 1448), float(step + dist.get_rank()))).sum().backward()
        net.finish_gradient_synchronization()
        found = [p.grad.clone() for p in module.parameters()]
        total = sum(module(torch.full((4, 1448), float(step + rank))).sum() for rank in range(2)) / 2
        for ours, full in zip(found, torch.autograd.grad(total, module.parameters()), strict=True):
            assert torch.allclose(ours, full, rtol=1e-4)  # float32: sums of 1448


def gradients_may_stay_in_place(name):
    """With set_to_none=False, gradients stay views of the buffer and must not accumulate over steps."""
    nets = [wrap(name, mlp()), wrap(name, mlp())]
    for step in range(3):
        for net in nets if step == 2 else nets[:1]:
            net.zero_grad(set_to_none=False)
            net(torch.full((1, 10), float(step + dist.get_rank()))).sum().backward()
            net.finish_gradient_synchronization()
    assert torch.equal(*(net.module[0].weight.grad for net in nets))


def what_cannot_be_wrapped_is_refused(name):
    net = wrap(name, mlp())
    with pytest.raises(ValueError, match=r"parameter '0.weight' is already wrapped by a \w+DDP: delete that first"):
        wrap(name, nn.Sequential(*net.module))
    sparse = wrap(name, nn.Embedding(4, 3, sparse=True))
    with pytest.raises(ValueError, match="the gradient of 'weight' has layout torch.sparse_coo"):
        sparse(torch.tensor([0, 1])).sum().backward()
        sparse.finish_gradient_synchronization()
    with pytest.raises(ValueError, match=r"module \(=Sequential\) must have a parameter that needs a gradient"):
        wrap(name, mlp().requires_grad_(False))


def a_deleted_wrapper_frees_everything(name):
    net = wrap(name, mlp())
    net(torch.ones(1, 10)).sum().backward()
    net.finish_gradient_synchronization()
    gone = [weakref.ref(net), weakref.ref(net.module[0].weight)]
    gc.disable()  # freed by counting alone: no cycle through a hook
    try:
        del net
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


CHECKS = (
    issued_collectives_are_the_planned_ones, gradients_may_stay_in_place, what_cannot_be_wrapped_is_refused,
    a_deleted_wrapper_frees_everything,
)  # fmt: skip


def check_all(name):
    is_alone = dist.get_world_size() == 1
    for check in (issued_collectives_are_the_planned_ones,) if is_alone else CHECKS:
        check(name)
    if name == "overlapped" and not is_alone:
        a_backward_is_discarded_while_it_is_in_flight(name)


def bad_input():
    net = torchref.BucketedDDP(nn.Linear(2, 1), device_ids=None, static_graph=True)  # of DDP; they change nothing
    with pytest.raises(RuntimeError, match="a BucketedDDP is not pickled"):
        copy.deepcopy(net)
    for call, message in (
        (lambda: torchref.BucketedDDP(mlp(), 1, bucket_size_mb=None), r"bucket_mb \(=1\) and bucket_size_mb \(=None\)"),
        (lambda: torchref.BucketedDDP(mlp(), bucket_cap_mb=25), "BucketedDDP has no option bucket_cap_mb; caps"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    plans = [torchref.BucketedDDP(mlp(), **{cap: 0.001}).plan for cap in ("bucket_mb", "bucket_size_mb")]
    assert plans[0] == plans[1] and len(plans[0].buckets) > 1


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_strategy_keeps_its_promises(ranks, name, num_ranks):
    ranks.run(check_all, name, num_ranks=num_ranks)


def test_bad_input(ranks):
    ranks.run(bad_input, num_ranks=2)
