"""Stage 1: full gradients until the synchronisation, an optimizer over shards, full parameters after the step."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication.sharding import local_shard
from torchref.gradients import SpentGradient


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def inputs(rank=None):
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3) * (1 + (dist.get_rank() if rank is None else rank))


def backward(net, x=None):
    net(inputs() if x is None else x).square().sum().backward()


def sum_over_ranks(module, num_ranks):
    module.zero_grad()
    for rank in range(num_ranks):
        backward(module, inputs(rank))
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


# On the ranks


def gradients_step_by_step():
    """Gradients of the module and of the shards: before and after the synchronisation, and after zero_grad."""
    net = torchref.ZeRO1(mlp(), torch.optim.SGD, lr=0.1)
    local = mlp()
    backward(local)
    backward(net)
    found = [all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), local.parameters(), strict=True))]
    net.finish_gradient_synchronization(denominator=1)
    found.append(all(isinstance(parameter.grad, SpentGradient) for parameter in net.parameters()))
    total = sum_over_ranks(mlp(), net.num_ranks)
    for name, shard in net._shards.items():
        expected = local_shard(total[name], net.num_ranks, dist.get_rank())
        torch.testing.assert_close(shard.grad, expected, rtol=1e-14, atol=1e-14)  # float64: the order of two sums
    net.zero_grad()
    found.append(all(shard.grad is None for shard in net._shards.values()))
    return found


def shards_share_the_modules_memory():
    net = torchref.ZeRO1(nn.Linear(4, 4, bias=False), torch.optim.SGD, lr=0.1)
    place = net.module.weight.data_ptr() + 32 * dist.get_rank()  # 8 of 16 floats
    (shard,) = net._shards.values()
    return shard.data_ptr() == place


def groups_and_schedule():
    """Two groups with different options and a schedule, compared with one process."""
    results = []
    for sharded in (True, False):
        module = mlp()
        module[0].bias.requires_grad_(False)
        decay = [parameter for parameter in module.parameters() if parameter.ndim > 1]
        rest = [parameter for parameter in module.parameters() if parameter.ndim <= 1]  # a frozen one among them
        groups = [{"params": iter(decay), "weight_decay": 0.5}, {"params": rest, "lr": 0.3}]
        if sharded:
            net = torchref.ZeRO1(module, torch.optim.AdamW, 1e-4, params=groups, lr=0.1, weight_decay=0.0)
            optimizer = net.optimizer
        else:
            optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            if sharded:
                backward(net)
                net.finish_gradient_synchronization(denominator=1)
                net.step()
            else:
                for rank in range(dist.get_world_size()):
                    backward(module, inputs(rank))
                optimizer.step()
            schedule.step()
        results.append([parameter.detach() for parameter in module.parameters()])
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(*results, strict=True))


def weights_given_later():
    """Weights loaded after wrapping are the ones that are trained."""
    net = torchref.ZeRO1(mlp(), torch.optim.SGD, lr=0.0)
    net.module.load_state_dict(mlp(seed=5).state_dict())
    backward(net)
    net.finish_gradient_synchronization()
    net.step()
    return all(torch.equal(p, q) for p, q in zip(net.parameters(), mlp(seed=5).parameters(), strict=True))


def steps_on_the_same_gradients():
    net = torchref.ZeRO1(mlp(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="step needs averaged gradients: call finish_gradient_synchronization after"):
        net.step()
    backward(net)
    net.finish_gradient_synchronization(denominator=1)
    net.step()
    net.step()
    module = mlp()
    total = sum_over_ranks(module, net.num_ranks)
    for name, parameter in net.module.named_parameters():
        expected = module.get_parameter(name) - 0.2 * total[name]
        torch.testing.assert_close(parameter, expected, rtol=1e-14, atol=1e-14)  # float64: two steps of 0.1


def channels_last():
    torch.manual_seed(0)
    module = nn.Conv2d(3, 8, 3).double().to(memory_format=torch.channels_last)
    net = torchref.ZeRO1(module, torch.optim.SGD, lr=0.1)
    x = torch.arange(2 * 3 * 16, dtype=torch.float64).view(2, 3, 4, 4)
    alone = nn.Conv2d(3, 8, 3).double()
    alone.load_state_dict(module.state_dict())
    alone(x).sum().backward()
    net(x.to(memory_format=torch.channels_last)).sum().backward()
    net.finish_gradient_synchronization()
    net.step()
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    return (module.weight - (alone.weight - 0.1 * alone.weight.grad)).abs().max().item()


LIVES = {  # "part" is a layer of the module, "clear" is all of it: both by their own zero_grad, not the wrapper's
    "before the step": "pass finish clear step pass finish step",
    "before the step after a look": "pass finish look clear step pass finish step",
    "in place of the wrapper's": "pass finish step clear pass finish step clear look pass finish step",
    "after the forward": "pass finish step forward clear backward finish step forward clear backward finish step",
    "never": "pass finish step pass finish step",
    "part": "pass finish part step pass finish step part pass finish step",
    "part after the forward": "pass finish step forward part backward finish step",
    "between synchronisations": "pass finish clear pass finish step",
    "before a synchronisation alone": "pass finish clear look finish step",
    "before the synchronisation": "pass finish pass clear finish step",
    "between micro-batches": "quiet clear pass finish step",
    "part between micro-batches": "quiet quiet part pass finish step",
    "between micro-batches after the forward": "quiet forward clear backward finish step",
    "after micro-batches": "quiet quiet clear finish step pass finish step",
    "never with micro-batches": "pass finish quiet quiet pass finish quiet pass finish step",
    "between micro-batches after a synchronisation": "pass finish quiet clear quiet pass finish step",
    "after a discarded pass": "pass finish lost discard clear pass finish step",
    "part after a discarded pass": "pass finish lost discard part pass finish step",
    "never with a discarded pass": "pass finish lost discard pass finish step",
    "before and after a discarded pass": "pass finish pass finish clear discard pass finish step",
}


def live(life, wrap, num_layers):
    """Weights after a life of a wrapped module, less those of one process: steps on nothing are refused or none."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(num_layers))).double()
    alone = copy.deepcopy(module)
    net, tx = wrap(module), torch.optim.SGD(alone.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(1)
    for event in life.split():
        if event in ("pass", "quiet", "forward"):
            x = torch.randn(net.num_ranks, 4, 3, dtype=torch.float64, generator=rng)
            with net.no_sync() if event == "quiet" else contextlib.nullcontext():
                loss = net(x[dist.get_rank()]).square().sum()
                if event != "forward":
                    loss.backward()
            expected = alone(x).square().sum() / net.num_ranks
            if event != "forward":
                expected.backward()
        elif event == "backward":
            loss.backward()
            expected.backward()
        elif event == "lost":  # one that is not in the weights
            net(torch.ones(1, 3, dtype=torch.float64)).square().sum().backward()
        elif event == "discard":
            net.on_train_batch_start()
        elif event == "finish":
            net.finish_gradient_synchronization()
        elif event == "look":
            net(torch.ones(1, 3, dtype=torch.float64))
        elif event in ("clear", "part"):
            for one in (module, alone):
                (one if event == "clear" else one[-1]).zero_grad()
        else:
            with contextlib.suppress(RuntimeError):  # "step needs averaged gradients"
                net.step()
            tx.step()
    return max((p - q).abs().max().item() for p, q in zip(module.parameters(), alone.parameters(), strict=True))


def live_under_zero1(life, num_layers):
    return live(LIVES[life], lambda module: torchref.ZeRO1(module, torch.optim.SGD, 1e-6, lr=0.1), num_layers)


def uses_of_cleared_gradients():
    """What a step, clipping and the norm say of gradients that the module cleared or replaced."""
    net, messages = torchref.ZeRO1(mlp(), torch.optim.SGD, lr=0.1), []

    def replace():
        net.module[0].bias.grad = torch.ones(5, dtype=torch.float64)

    for change, use in [
        (net.module.zero_grad, net.step),
        (net.module.zero_grad, net.grad_norm),
        (net.module.zero_grad, lambda: net.clip_grad_norm_(1.0)),
        (replace, net.step),
    ]:
        net.zero_grad()
        backward(net)
        net.finish_gradient_synchronization()
        change()
        try:
            use()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def casts_of_the_module():
    """Moves and casts of a module whose gradients are in shards leave them there."""
    net = torchref.ZeRO1(mlp(), torch.optim.SGD, lr=0.1)
    backward(net)
    net.finish_gradient_synchronization()
    norm = net.grad_norm()
    net.module.cpu()
    net.module.float().double()
    net.to("cpu")
    return torch.equal(norm, net.grad_norm())


def part_cleared_under_a_synchronised_one(life):
    try:
        live(life, lambda module: torchref.ZeRO1(module, torch.optim.SGD, 1e-6, lr=0.1), 3)
    except RuntimeError as error:
        return str(error)
    return ""


def bad_input():
    with pytest.raises(ValueError, match="params must be parameters of the module, or groups of them; one is not"):
        torchref.ZeRO1(mlp(), torch.optim.SGD, params=mlp().parameters(), lr=0.1)
    for params in (set(mlp().parameters()), [{"params": set(mlp().parameters())}]):
        with pytest.raises(
            TypeError, match=r"params \(=set\) must be a list: a set is in another order in each process"
        ):
            torchref.ZeRO1(mlp(), torch.optim.SGD, params=params, lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer \(=Adafactor\) must be element-wise to be sharded"):
        torchref.ZeRO1(mlp(), torch.optim.Adafactor, lr=0.1)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        torchref.ZeRO1(mlp(), torch.optim.SGD, lr=-1)


# In the test process


def test_gradients_are_full_until_the_synchronisation(ranks):
    assert ranks.run(gradients_step_by_step, num_ranks=3) == [[True, True, True]] * 3


def test_shards_are_views_of_the_parameters(ranks):
    assert ranks.run(shards_share_the_modules_memory, num_ranks=2) == [True, True]


def test_groups_and_schedules(ranks):
    assert max(ranks.run(groups_and_schedule, num_ranks=2)) <= 1e-12  # float64: the order of sums


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("life", LIVES)
def test_gradients_that_the_module_clears_are_cleared_in_shards(ranks, life, num_layers):
    # float64: the order of sums
    assert max(ranks.run(live_under_zero1, life, num_layers, num_ranks=2)) <= 1e-12


@pytest.mark.parametrize(
    "life",
    [
        "pass finish quiet part finish step",
        "pass finish quiet part pass finish step",
        "pass finish quiet forward part backward finish step",
        "pass finish quiet forward clear backward finish step",
    ],
)
def test_a_local_gradient_cleared_over_a_synchronised_one_is_refused(ranks, life):
    for message in ranks.run(part_cleared_under_a_synchronised_one, life, num_ranks=2):
        assert "was changed while it was reduced" in message


def test_cleared_and_replaced_gradients_are_refused(ranks):
    for cleared, *others, replaced in ranks.run(uses_of_cleared_gradients, num_ranks=2):
        assert cleared.startswith("step needs averaged gradients")
        assert len(others) == 2 and all(message.startswith("there are no gradients") for message in others)
        assert replaced.startswith("gradients were set after finish_gradient_synchronization") and "\n" not in replaced


def test_casts_of_the_module_leave_gradients_in_shards(ranks):
    assert ranks.run(casts_of_the_module, num_ranks=2) == [True, True]


def test_weights_loaded_after_wrapping_are_trained(ranks):
    assert ranks.run(weights_given_later, num_ranks=3) == [True] * 3


def test_step_needs_gradients_and_may_use_them_twice(ranks):
    ranks.run(steps_on_the_same_gradients, num_ranks=2)


def test_parameters_of_any_memory_format(ranks):
    assert max(ranks.run(channels_last, num_ranks=3)) <= 1e-12  # float64, weights and gradients of order 100


def test_bad_input(ranks):
    ranks.run(bad_input, num_ranks=2)
