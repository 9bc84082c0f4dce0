"""Optimizers that are element-wise at first sight: refused, or trained right because they are."""

import pytest
import torch

from torchref.zero.elementwise import check_elementwise


class Clipping(torch.optim.SGD):
    """Clips inside of its step, which small gradients do not show."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 100.0)
        return super().step(closure)


class WarmTrust(torch.optim.SGD):
    """Scales by a norm after a warm-up."""

    def step(self, closure=None):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            if self.num_steps > 10:
                parameter.grad *= parameter.detach().norm()
        return super().step(closure)


class BySize(torch.optim.SGD):
    """Scales the gradients of large parameters by their norm."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() > 1000:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class ByDtype(torch.optim.SGD):
    """Scales float32 gradients by their norm."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.dtype == torch.float32:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class ByRate(torch.optim.SGD):
    """Scales gradients by their norm at small rates."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if self.param_groups[0]["lr"] < 0.5:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class AtLast(torch.optim.SGD):
    """Scales by a norm after more steps than any trial takes."""

    def step(self, closure=None):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            if self.num_steps > 100_000:
                parameter.grad *= parameter.detach().norm()
        return super().step(closure)


class Hooked(torch.optim.SGD):
    """Clips in a hook, not in its step."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.register_step_pre_hook(clip)


def clip(optimizer, args, kwargs):
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 9.0)


class Lion(torch.optim.Optimizer):
    """The sign of an average, element by element."""

    elementwise = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            parameter.sub_(torch.sign(0.9 * average + 0.1 * parameter.grad), alpha=self.param_groups[0]["lr"])
            average.mul_(0.99).add_(parameter.grad, alpha=0.01)


class Renamed(torch.optim.AdamW):
    """Torch's own step under another name."""


@pytest.mark.parametrize("optimizer", [Clipping, WarmTrust, BySize, ByDtype, ByRate, Hooked])
def test_what_acts_by_size_scale_dtype_rate_or_step_is_found_out(optimizer):
    optimizer = type(optimizer.__name__, (optimizer,), {"elementwise": True})
    with pytest.raises(ValueError, match="must be element-wise to be sharded: its steps differ"):
        check_elementwise(optimizer, {"lr": 0.1})


@pytest.mark.parametrize("optimizer", [Clipping, WarmTrust, BySize, ByDtype, ByRate, Hooked, AtLast])
def test_what_has_a_step_of_its_own_must_say_that_it_is_element_wise(optimizer):
    with pytest.raises(ValueError, match="must be element-wise to be sharded"):
        check_elementwise(optimizer, {"lr": 0.1})


@pytest.mark.parametrize("optimizer", [Lion, Renamed])
def test_what_is_element_wise_is_accepted(optimizer):
    check_elementwise(optimizer, {"lr": 0.1})
