"""Stage 2: full gradients are freed with their bucket, also between micro-batches."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication.collectives import record
from torchref.gradients import SpentGradient
from torchref.zero.stage1_test import LIVES, live


class Branches(nn.Module):
    """Two branches, of which a forward uses one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, branch):
        return getattr(self, branch)(torch.ones(1, 3)).sum()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))


def wrap(module, accumulate="shards"):
    return torchref.ZeRO2(module, torch.optim.SGD, 2 * 16 * 16 * 4 / 2**20, accumulate=accumulate, lr=1.0)  # 2 layers


def num_gradients(net):
    return sum(not isinstance(parameter.grad, (SpentGradient, type(None))) for parameter in net.parameters())


# On the ranks


def most_gradients_at_once(accumulate):
    """Number of full gradients: the maximum during a backward and after it, under no_sync and outside."""
    net, seen = wrap(layers(), accumulate), []
    for layer in net.module:  # after the wrapper's own hook
        layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(num_gradients(net)))
    with record() as issued, net.no_sync():
        net(torch.ones(1, 16)).sum().backward()
    first = (max(seen), num_gradients(net), len(issued))
    seen.clear()
    net(torch.ones(1, 16)).sum().backward()
    return first, (max(seen), num_gradients(net))


def accumulated(accumulate, together):
    """Three backward passes, under one no_sync or one each, compared with a single one over all rows."""
    x = torch.arange(48.0).view(3, 16) * (1 + dist.get_rank())
    net, at_once = wrap(layers(), accumulate), wrap(layers(), accumulate)
    if together:
        with net.no_sync():
            for row in x[:2]:
                net(row).sum().backward()
    else:
        for row in x[:2]:
            with net.no_sync():
                net(row).sum().backward()
    net(x[2]).sum().backward()
    at_once(x).sum().backward()
    grads = []
    for one in (net, at_once):
        one.finish_gradient_synchronization()
        grads.append(torch.cat([chunk.grad for chunk in one._shards.values()]))
    return ((grads[0] - grads[1]).abs().max() / grads[1].abs().max()).item()


def branches(accumulate):
    """Ranks use different parameters, so that a bucket is full on one rank only."""
    net = torchref.ZeRO2(Branches(), torch.optim.SGD, 1e-6, accumulate=accumulate, lr=1.0)
    net.module.load_state_dict({"left.weight": torch.zeros(1, 3), "right.weight": torch.zeros(1, 3)})
    with net.no_sync():
        for branch in ("right", "left"):
            net(branch if dist.get_rank() == 0 else "left").backward()
    net("right").backward()
    net.finish_gradient_synchronization(denominator=1)
    net.step()
    return {name: parameter.detach().flatten().tolist() for name, parameter in net.module.named_parameters()}


def discarded():
    """A discarded backward does not count in the next step."""
    net = wrap(layers())
    for gives_up in (net.on_train_batch_start, net.zero_grad):
        with net.no_sync():
            net(torch.full((1, 16), 7.0)).sum().backward()
        gives_up()
    net(torch.ones(1, 16)).sum().backward()
    net.finish_gradient_synchronization()
    fresh = wrap(layers())
    fresh(torch.ones(1, 16)).sum().backward()
    fresh.finish_gradient_synchronization()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(net._shards.values(), fresh._shards.values(), strict=True))


def live_under_zero2(life, num_layers, accumulate):
    def wrap_one(module):
        return torchref.ZeRO2(module, torch.optim.SGD, 1e-6, accumulate=accumulate, lr=0.1)

    return live(LIVES[life], wrap_one, num_layers)


def part_cleared_too_late():
    net = wrap(layers())
    net(torch.ones(1, 16)).sum().backward()
    net.module[0].zero_grad()
    with pytest.raises(RuntimeError, match=r"the gradient of '0.weight' was changed while it was reduced: change"):
        net.finish_gradient_synchronization()


def second_backward():
    net = wrap(layers())
    net(torch.ones(1, 16)).sum().backward()
    with pytest.raises(RuntimeError, match="the gradient of '.*' was computed twice: call finish_gradient_synchron"):
        net(torch.ones(1, 16)).sum().backward()


def bad_input():
    with pytest.raises(ValueError, match=r"accumulate \(='bucket'\) must be 'shards' or 'full'"):
        wrap(layers(), "bucket")


# In the test process


def test_gradients_are_freed_bucket_by_bucket(ranks):
    # 2 layers a bucket, 4 buckets; the hook that counts runs after the one that frees.
    assert ranks.run(most_gradients_at_once, "shards", num_ranks=2) == [((1, 0, 4), (1, 0))] * 2
    assert ranks.run(most_gradients_at_once, "full", num_ranks=2) == [((8, 8, 0), (8, 0))] * 2


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("accumulate", ["shards", "full"])
def test_micro_batches_accumulate(ranks, accumulate, together):
    assert max(ranks.run(accumulated, accumulate, together, num_ranks=2)) < 1e-5  # float32 sums in another order


@pytest.mark.parametrize("accumulate", ["shards", "full"])
def test_ranks_may_use_different_parameters(ranks, accumulate):
    expected = {"left.weight": [-3.0] * 3, "right.weight": [-3.0] * 3}  # 1 + 2 passes over each, gradients of 1
    assert ranks.run(branches, accumulate, num_ranks=2) == [expected] * 2


def test_an_accumulated_backward_can_be_discarded(ranks):
    assert ranks.run(discarded, num_ranks=2) == [True, True]


@pytest.mark.sample
@pytest.mark.parametrize("accumulate", ["shards", "full"])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("life", LIVES)
def test_gradients_that_the_module_clears_are_cleared_in_shards(ranks, life, num_layers, accumulate):
    # float64: the order of sums
    assert max(ranks.run(live_under_zero2, life, num_layers, accumulate, num_ranks=2)) <= 1e-12


def test_a_gradient_cleared_while_it_is_reduced_is_refused(ranks):
    ranks.run(part_cleared_too_late, num_ranks=2)


def test_two_backward_passes_without_finishing_are_refused(ranks):
    ranks.run(second_backward, num_ranks=2)


def test_bad_input(ranks):
    ranks.run(bad_input, num_ranks=2)
