"""Which optimizers may run on shards."""

import pytest
import torch

from torchref.elementwise import check_elementwise

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


class Decaying(torch.optim.SGD):
    """Decays matrices only, by their number of dimensions."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9 if parameter.ndim > 1 else 1.0)
        super().step()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_works_element_by_element_is_accepted(name):
    check_elementwise(getattr(torch.optim, name), {})
    check_elementwise(getattr(torch.optim, name), {"lr": 0.0})


@pytest.mark.parametrize("options", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1, "maximize": True}])
def test_options_are_tried(options):
    check_elementwise(torch.optim.SGD, {"lr": 1e-9, **options})


@pytest.mark.parametrize("lr", [0.0, 1e-9, 0.1])
@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, Scaled, Decaying])
def test_what_looks_at_the_whole_is_refused_whatever_its_learning_rate(optimizer, lr):
    with pytest.raises(ValueError, match=rf"optimizer \(={optimizer.__name__}\) must be element-wise to be sharded"):
        check_elementwise(optimizer, {"lr": lr})
