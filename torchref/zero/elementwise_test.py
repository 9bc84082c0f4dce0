"""Which optimizers are accepted as element-wise."""

import pytest
import torch

from torchref.zero.elementwise import check_elementwise

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


class Scaled(torch.optim.Optimizer):
    """Scales each step by the norm of its parameter, as LAMB and LARS do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * parameter.norm(), alpha=group["lr"])


class Normalised(torch.optim.Optimizer):
    """Divides all gradients by their norm together."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm, alpha=self.param_groups[0]["lr"])


class Decaying(torch.optim.SGD):
    """Decays matrices only, by their number of dimensions."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9 if parameter.ndim > 1 else 1.0)
        super().step()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_wise_optimizers_are_accepted(name):
    check_elementwise(getattr(torch.optim, name), {})
    check_elementwise(getattr(torch.optim, name), {"lr": 0.0})


@pytest.mark.parametrize("options", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1, "maximize": True}])
def test_options_are_used(options):
    check_elementwise(torch.optim.SGD, {"lr": 1e-9, **options})


@pytest.mark.parametrize("lr", [0.0, 1e-9, 0.1])
@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, Scaled, Normalised, Decaying])
def test_others_are_refused_at_any_learning_rate(optimizer, lr):
    with pytest.raises(ValueError, match=rf"optimizer \(={optimizer.__name__}\) must be element-wise to be sharded"):
        check_elementwise(optimizer, {"lr": lr})


@pytest.mark.parametrize(
    ("optimizer", "cause", "its_message"),
    [
        (torch.optim.LBFGS, TypeError, "TypeError: .* argument: 'closure'"),
        (torch.optim.SparseAdam, RuntimeError, "RuntimeError: SparseAdam does not support dense gradients"),
        (torch.optim.Muon, ValueError, "ValueError: Muon only supports 2D parameters"),
    ],
)
def test_the_error_of_an_optimizer_that_cannot_step_is_shown(optimizer, cause, its_message):
    message = rf"optimizer \(={optimizer.__name__}\) must be element-wise to be sharded: .* it raises {its_message}.*$"
    with pytest.raises(ValueError, match=message) as refused:
        check_elementwise(optimizer, {"lr": 0.1})
    assert isinstance(refused.value.__cause__, cause)
    assert "\n" not in str(refused.value)


def test_bad_options_raise_the_optimizers_own_error():
    with pytest.raises(ValueError, match="^Invalid weight_decay value: -1"):
        check_elementwise(torch.optim.SGD, {"weight_decay": -1})
    with pytest.raises(ValueError, match=r"^optimizer_cls \(=SGD\) must take the options .*argument 'decay'$"):
        check_elementwise(torch.optim.SGD, {"decay": 1})
