"""The optimizer of ZeRO-1 and ZeRO-2 is torch's to a loop, a schedule and a checkpoint."""

import copy
import io
import unittest.mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchref
from torchref import agreement
from torchref.zero.zero_test import batches, corners, rows

BUCKET_MB = 1e-4
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),  # has state before its first step
}
SCHEDULES = {
    "none": None,
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
}
stages = pytest.mark.parametrize("stage", [torchref.ZeRO1, torchref.ZeRO2])


def make(stage, module, optimizer="adamw", grouped=True):
    cls, options = OPTIMIZERS[optimizer]
    params = groups(module) if grouped else None
    net = stage(module, cls, BUCKET_MB, params=params, sync="backward", **options)
    return net, torchref.ZeROOptimizer(net)


def make_alone(module, optimizer="adamw", grouped=True):
    cls, options = OPTIMIZERS[optimizer]
    return cls(groups(module) if grouped else module.parameters(), **options)


def groups(module):
    """Two, both with frozen parameters."""
    parameters = list(module.parameters())
    return [{"params": parameters[1::2], "lr": 0.03}, {"params": parameters[::2]}]


def loss_of(net, batch):
    return F.cross_entropy(net(batch["tokens"]).flatten(0, 1), batch["tokens"].roll(1, dims=1).flatten())


def state_alone(tx):
    """Of trained parameters: some of torch's optimizers have state of frozen ones, which they do not use."""
    parameters = [parameter for group in tx.param_groups for parameter in group["params"]]
    whole = tx.state_dict()
    return {**whole, "state": {key: one for key, one in whole["state"].items() if parameters[key].requires_grad}}


def take_steps(net, tx, schedule, which, whole=False):
    """A loop as any torch script has it."""
    for batch in batches()[which]:
        tx.zero_grad()
        loss_of(net, batch if whole else rows(batch)).backward()
        if whole:  # a parameter that is not used has a zero gradient in this project
            for parameter in net.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        tx.step()
        if schedule is not None:
            schedule.step()


def furthest(found, expected):
    """The largest difference of two nested state dicts of the same keys and shapes; other values must be equal."""
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape and found.dtype == expected.dtype and found.device == expected.device
        assert found.stride() == expected.stride()
        return (found - expected).abs().max().item() if found.numel() else 0.0
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return max((furthest(found[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, list):
        assert len(found) == len(expected)
        return max((furthest(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
    assert found == expected
    return 0.0


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def restored(state):
    return torch.load(io.BytesIO(state))  # weights only: nothing but tensors and plain values


# On the ranks


def trained(stage, optimizer, schedule, grouped):
    """How far weights and state are from those of one process, and both as saved."""
    net, tx = make(stage, corners(), optimizer, grouped)
    alone = corners()
    tx_alone = make_alone(alone, optimizer, grouped)
    make_schedule = SCHEDULES[schedule] or (lambda _: None)
    take_steps(net, tx, make_schedule(tx), slice(2))
    take_steps(alone, tx_alone, make_schedule(tx_alone), slice(2), whole=True)
    difference = furthest(net.module.state_dict(), alone.state_dict())
    mine = tx.state_dict()
    difference = max(difference, furthest(mine, state_alone(tx_alone)))
    return difference, saved([net.module.state_dict(), mine])


def resumed(stage, optimizer, checkpoint, uninterrupted):
    """How far two more steps from a checkpoint are from those that went on."""
    module = corners(seed=5)
    weights, state = restored(checkpoint)
    module.load_state_dict(weights)
    kept = copy.deepcopy(state)
    if stage is None:
        net, tx = module, make_alone(module, optimizer)
    else:
        net, tx = make(stage, module, optimizer)
        net.module.load_state_dict(weights)
    tx.load_state_dict(state)
    assert furthest(tx.state_dict(), kept) == 0
    take_steps(net, tx, None, slice(2, 4), whole=stage is None)
    assert stage is None or furthest(state, kept) == 0  # what was loaded is no part of the optimizer
    return furthest([module.state_dict(), tx.state_dict()], restored(uninterrupted))


def four_steps_alone(optimizer):
    alone = corners()
    tx = make_alone(alone, optimizer)
    take_steps(alone, tx, None, slice(2), whole=True)
    checkpoint = saved([alone.state_dict(), state_alone(tx)])
    take_steps(alone, tx, None, slice(2, 4), whole=True)
    return checkpoint, saved([alone.state_dict(), state_alone(tx)])


def scalars_and_layouts(stage):
    """State of a module of scalars alone, and of a convolution in another layout, through a state dict."""
    found = []
    torch.manual_seed(0)
    for module in (nn.ParameterList([nn.Parameter(torch.tensor(2.0))]), nn.Conv2d(3, 8, 3)):
        module.to(memory_format=torch.channels_last)
        alone = copy.deepcopy(module)
        tx_alone = torch.optim.NAdam(alone.parameters())
        net = stage(module, torch.optim.NAdam)
        tx = torchref.ZeROOptimizer(net)
        for one, optimizer in ((alone, tx_alone), (module, tx)):
            sum((parameter * parameter).sum() for parameter in one.parameters()).backward()
            if one is module:
                net.finish_gradient_synchronization()
            optimizer.step()
        found.append(furthest(tx.state_dict(), tx_alone.state_dict()))
        tx.load_state_dict(tx_alone.state_dict())
        found.append(furthest(tx.state_dict(), tx_alone.state_dict()))
    return max(found)


def with_a_closure():
    net, tx = make(torchref.ZeRO1, corners())
    batch = rows(batches()[0])

    def closure():
        tx.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    expected = loss_of(net.module, batch).item()
    return tx.step(closure).item() == expected and loss_of(net.module, batch).item() < expected


def message_of(kind):
    net, tx = make(torchref.ZeRO1, corners())
    state = tx.state_dict()
    batch = rows(batches()[0])
    loss_of(net, batch).backward()
    try:
        if kind == "scaler":
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.step(tx)
        elif kind == "clipping":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        elif kind == "hook":
            tx.register_step_pre_hook(
                lambda *_: [parameter.grad.mul_(0.5) for parameter in net.parameters() if parameter.requires_grad]
            )
            tx.step()
        elif kind == "group":
            tx.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        elif kind == "other schedule":
            torch.optim.lr_scheduler.StepLR(net.optimizer, 1)
            tx.step()
        elif kind == "wrapper":
            torchref.ZeROOptimizer(torchref.NaiveDDP(nn.Linear(2, 2)))
        elif kind == "groups":
            tx.load_state_dict(make_alone(corners(), grouped=False).state_dict())
        elif kind == "shapes":
            tx.step()
            state = tx.state_dict()
            number = next(number for number, one in state["state"].items() if one["exp_avg"].ndim > 1)
            state["state"][number]["exp_avg"] = torch.ones(3)
            tx.load_state_dict(state)
        elif kind == "one rank":
            if dist.get_rank() == 1:
                tx.load_state_dict(state)
            with unittest.mock.patch.object(agreement, "_LATE_S", 0.1):
                tx.step()
        else:
            net, tx = make(torchref.ZeRO1, corners())
            with net.no_sync():
                loss_of(net, batch).backward()
            tx.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


# Tests


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@stages
def test_a_schedule_drives_it(ranks, stage, optimizer, schedule):
    for difference, _ in ranks.run(trained, stage, optimizer, schedule, schedule != "step", num_ranks=2):
        assert difference <= 1e-12  # float64: the order of sums


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_that_of_one_process_and_moves_between_numbers_of_ranks(ranks, optimizer):
    (checkpoint, uninterrupted), _ = ranks.run(four_steps_alone, optimizer, num_ranks=2)
    (difference, sharded), _ = ranks.run(trained, torchref.ZeRO2, optimizer, "none", True, num_ranks=2)
    assert difference <= 1e-12  # float64: the order of sums
    for state in (checkpoint, sharded):
        for stage, num_ranks in ((torchref.ZeRO1, 3), (torchref.ZeRO2, 1), (None, 1)):
            found = ranks.run(resumed, stage, optimizer, state, uninterrupted, num_ranks=num_ranks)
            assert max(found) <= 1e-12  # float64: the order of sums


@stages
def test_state_of_scalars_and_of_other_layouts(ranks, stage):
    assert max(ranks.run(scalars_and_layouts, stage, num_ranks=2)) <= 1e-7  # float32: a mean over ranks


def test_a_closure(ranks):
    assert ranks.run(with_a_closure, num_ranks=2) == [True, True]


MESSAGES = {
    "scaler": "this gradient was reduced into the ranks' shards",
    "clipping": "this gradient was reduced into the ranks' shards: call clip_grad_norm_ or grad_norm of the wrapper",
    "hook": "this gradient was reduced into the ranks' shards",
    "group": "a parameter group cannot be added after wrapping: give it to the wrapper, in params",
    "other schedule": "options of net.optimizer were changed, which those of its ZeROOptimizer replace",
    "wrapper": "net (=NaiveDDP) must be a ZeRO1 or ZeRO2",
    "groups": "state_dict (=groups of [15] parameters) must have groups of [7, 8]",
    "shapes": "exp_avg of 'unused.weight' (=[3]) must have the parameter's shape (=[1, 2])",
    "not synchronised": "gradients are of this rank alone: call finish_gradient_synchronization",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_what_it_cannot_do_is_refused(ranks, kind):
    for message in ranks.run(message_of, kind, num_ranks=2):
        assert message.startswith(MESSAGES[kind]) and "\n" not in message


def test_state_that_one_rank_loads_is_refused(ranks):
    first, second = ranks.run(message_of, "one rank", num_ranks=2)
    assert first == ""
    assert second.startswith("optimizer state was loaded on rank 1 and not on rank 0")
