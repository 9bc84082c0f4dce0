"""Steps past the wrapper, such as a ``GradScaler``'s, and steps that were changed."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torchref
from torchref.late_parameters_test import model, wrap

# On the ranks


def step_of_the_optimizer_alone(name):
    net = wrap(name, model())
    net(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    net.finish_gradient_synchronization()
    try:
        net.optimizer.step()
    except RuntimeError as error:
        return str(error)
    return {key: parameter.tolist() for key, parameter in net.module.named_parameters()}


def clip_shards(optimizer, *_):
    grads = [one.grad for group in optimizer.param_groups for one in group["params"]]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    torch._foreach_mul_(grads, torch.clamp(0.1 / norm, max=1.0))


def patch_step(optimizer):
    step = optimizer.step

    @functools.wraps(step)
    def patched(*args):
        clip_shards(optimizer)
        return step(*args)

    optimizer.step = patched
    return optimizer


def hook_step(optimizer):
    optimizer.register_step_pre_hook(clip_shards)
    return optimizer


def step_of_a_changed_optimizer(name, change):
    """What a step that clips shards by their own norm is refused with, at wrapping or at the step."""
    handles = []
    try:
        if change == "factory hook":
            net = make(name, lambda params, lr: hook_step(torch.optim.SGD(params, lr=lr)))
        elif change == "factory step":
            net = make(name, lambda params, lr: patch_step(torch.optim.SGD(params, lr=lr)))
        elif change == "method":
            net = make(name, type("Clips", (torch.optim.SGD,), {"_init_group": lambda self, *args: clip_shards(self)}))
        else:
            net = make(name, Elementwise if change.startswith("own") else torch.optim.SGD)
            if change.endswith("hook"):
                hook_step(net.optimizer)
            elif change.endswith("post hook"):
                net.optimizer.register_step_post_hook(clip_shards)
            elif change.endswith("step"):
                patch_step(net.optimizer)
            else:
                handles.append(register_optimizer_step_pre_hook(clip_shards))
        net(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
        net.finish_gradient_synchronization()
        net.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        for handle in handles:
            handle.remove()
    return ""


def make(name, optimizer_cls):
    return {"zero1": torchref.ZeRO1, "zero2": torchref.ZeRO2}[name](model(), optimizer_cls=optimizer_cls, lr=0.1)


class Elementwise(torch.optim.SGD):
    """Torch's step with a line of its own, as a schedule may drive it, too."""

    elementwise = True

    def step(self, closure=None):
        return super().step(closure)


def step_of_a_scheduled_optimizer_of_its_own(name):
    net = make(name, Elementwise)
    schedule = torch.optim.lr_scheduler.StepLR(net.optimizer, 1)
    for _ in range(2):
        net.zero_grad()
        net(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
        net.finish_gradient_synchronization()
        net.step()
        schedule.step()
    return {key: parameter.tolist() for key, parameter in net.module.named_parameters()}


def step_of_a_scheduled_optimizer(name):
    net = wrap(name, model())
    schedule = torch.optim.lr_scheduler.StepLR(net.optimizer, 1)
    net(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    net.finish_gradient_synchronization()
    net.step()
    schedule.step()
    return {key: parameter.tolist() for key, parameter in net.module.named_parameters()}


def steps_of_a_scaler(kind, fused=False, unscales=False):
    """Two steps, of which the first overflows on rank 1's shard alone; their weights, or why they are refused."""
    net = torchref.FSDP(nn.Sequential(nn.Linear(1, 2, bias=False)))
    with torch.no_grad():
        net.module[0].weight.fill_(1.0)
    tx = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = (ShardedGradScaler if kind == "sharded" else torch.amp.GradScaler)("cpu", enabled=kind != "disabled")
    for step in range(2):
        out = net(torch.ones(1, 1))
        overflow = torch.tensor([1.0, 1e38 if step == 0 and kind != "disabled" else 1.0])
        scaler.scale((out * overflow).sum()).backward()
        net.finish_gradient_synchronization()
        try:
            if unscales:
                scaler.unscale_(tx)
            scaler.step(tx)
        except RuntimeError as error:
            return str(error)
        scaler.update()
        tx.zero_grad()
        if kind == "plain":  # no forward: rank 0 has stepped, or has been refused
            return ""
    return [net.gather_full_params()["0.weight"].flatten().tolist(), scaler.get_scale()]


# Tests


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_step_past_the_wrapper_is_refused(ranks, name):
    for message in ranks.run(step_of_the_optimizer_alone, name, num_ranks=2):
        assert "call step() of the wrapper" in message


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_schedule_drives_the_optimizer(ranks, name):
    first, second = ranks.run(step_of_a_scheduled_optimizer, name, num_ranks=2)
    assert first == second


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_schedule_drives_an_optimizer_with_a_step_of_its_own(ranks, name):
    first, second = ranks.run(step_of_a_scheduled_optimizer_of_its_own, name, num_ranks=2)
    assert first == second


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        *((change, "must be element-wise to be sharded") for change in ("factory hook", "factory step", "method")),
        *((f"{own}{change}", "got hooks or another step") for change in ("hook", "step") for own in ("", "own ")),
        ("post hook", "got hooks or another step"),
        ("global", "a hook of all optimizers changed this rank's shards of the gradients"),
    ],
)
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_step_that_sees_shards_alone_is_refused(ranks, name, change, rule):
    for message in ranks.run(step_of_a_changed_optimizer, name, change, num_ranks=2):
        assert rule in message and "\n" not in message


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_one_rank_is_refused_where_it_steps_on_shards(ranks, fused):
    first, second = ranks.run(steps_of_a_scaler, "plain", fused, num_ranks=2)
    assert first.startswith("GradScaler.step looks at this rank's shards alone") and "ShardedGradScaler" in first
    assert second == (first if fused else "")  # a fused step is always called


@pytest.mark.parametrize("fused", [False, True])
def test_a_sharded_scaler_skips_on_all_ranks(ranks, fused):
    first, second = ranks.run(steps_of_a_scaler, "sharded", fused, True, num_ranks=2)
    assert first == second
    torch.testing.assert_close(first, [[0.9, 0.9], 32768.0])
    if fused:
        for message in ranks.run(steps_of_a_scaler, "sharded", fused, num_ranks=2):
            assert "call its unscale_ before a fused step" in message


def test_a_disabled_scaler_steps(ranks):
    for weights, _ in ranks.run(steps_of_a_scaler, "disabled", num_ranks=2):
        torch.testing.assert_close(weights, [0.8, 0.8])
