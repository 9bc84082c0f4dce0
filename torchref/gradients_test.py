"""torch's own clipping, and optimizers over FSDP's shards: right, or refused in one line."""

import pytest
import torch
import torch.distributed as dist

import torchref
from torchref.late_parameters_test import model, wrap, wrappers
from torchref.passes_test import loss, optimizer_of, rows, weights

NUM_RANKS = 2
MAX_NORM = 1.0


def clipped_by_torch():
    """One step on one process, with the gradient clipped as torch does."""
    module = model()
    (sum(loss(module, rows(rank)) for rank in range(NUM_RANKS)) / NUM_RANKS).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return {key: parameter.tolist() for key, parameter in module.named_parameters()}


# On the ranks


def clipped(name, over):
    net = wrap(name, model())
    tx = optimizer_of(name, net)
    parameters = list(net.parameters())
    loss(net, rows(dist.get_rank())).backward()
    net.finish_gradient_synchronization()
    if over == "shards":
        parameters = [one for group in net.optimizer.param_groups for one in group["params"]]
    try:
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    except RuntimeError as error:
        return str(error)
    tx.step()
    return weights(name, net)


def clipped_too_early(name, by):
    net = wrap(name, model())
    loss(net, rows(dist.get_rank())).backward()
    try:
        if by == "torch":
            torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        else:
            net.clip_grad_norm_(MAX_NORM)
    except RuntimeError as error:
        return str(error)
    return ""


def step_over_shards(optimizer_cls):
    net = torchref.FSDP(model())
    tx = optimizer_cls(net.parameters(), lr=0.01)
    try:
        for _ in range(2):
            tx.zero_grad()
            loss(net, rows(dist.get_rank())).backward()
            net.finish_gradient_synchronization()
            tx.step()
    except ValueError as error:
        return str(error)
    return ""


class Lion(torch.optim.Optimizer):
    """Element-wise, without a word of it."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(torch.sign(parameter.grad), alpha=self.param_groups[0]["lr"])


class Declared(Lion):
    """Says that it is."""

    elementwise = True


def _divide_by_largest(optimizer, *_):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.div_(parameter.grad.abs().max())


def hooked(params, lr):
    """SGD with a hook of its own, which sees shards."""
    tx = torch.optim.SGD(params, lr=lr)
    tx.register_step_pre_hook(_divide_by_largest)
    return tx


def scheduled(params, lr):
    """SGD under a schedule, which wraps its step."""
    tx = torch.optim.SGD(params, lr=lr)
    torch.optim.lr_scheduler.StepLR(tx, 1)
    return tx


# Tests


@wrappers
def test_torchs_clipping_is_right_or_refused(ranks, name):
    for found in ranks.run(clipped, name, "parameters", num_ranks=NUM_RANKS):
        if name.startswith("zero"):
            assert "call clip_grad_norm_ or grad_norm of the wrapper" in found and "\n" not in found
            continue
        for key, right in clipped_by_torch().items():
            torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(right), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by", ["torch", "wrapper"])
@wrappers
def test_clipping_before_the_synchronisation_is_refused(ranks, name, by):
    for message in ranks.run(clipped_too_early, name, by, num_ranks=NUM_RANKS):
        assert "finish_gradient_synchronization" in message and "\n" not in message


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_torchs_clipping_of_shards_is_refused(ranks, name):
    for message in ranks.run(clipped, name, "shards", num_ranks=NUM_RANKS):
        assert message.startswith("this would be the norm of this rank's part of the gradients: call clip_grad_norm_")


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.LBFGS, Lion, hooked])
def test_an_optimizer_over_fsdps_shards_that_is_not_element_wise_is_refused(ranks, optimizer):
    for message in ranks.run(step_over_shards, optimizer, num_ranks=2):
        assert "must be element-wise to be sharded" in message and "\n" not in message


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam, Declared, scheduled])
def test_an_optimizer_over_fsdps_shards_that_is_element_wise_steps(ranks, optimizer):
    assert ranks.run(step_over_shards, optimizer, num_ranks=2) == ["", ""]
