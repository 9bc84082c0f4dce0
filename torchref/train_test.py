"""The trainer: weighted losses, accumulation, clipping and invalid arguments."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.train import local_rows


def batch(rows=24):
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(rows, 10, generator=generator), "y": torch.randn(rows, 5, generator=generator)}


def mean_loss(net, batch):
    return ((net(batch["x"]) - batch["y"]) ** 2).mean()


def masked_loss(net, batch):
    error = ((net(batch["x"]) - batch["y"]) ** 2).sum(1)
    return torchref.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())


def linear():
    torch.manual_seed(1)
    return nn.Linear(10, 5)


def trained(loss_fn, data, num_microbatches=1, num_steps=1, **options):
    """Trains on this rank's rows, or alone outside of a group."""
    module = linear()
    parallel = dist.is_initialized()
    net = torchref.BucketedDDP(module) if parallel else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    trainer = torchref.Trainer(loss_fn, optimizer, net, num_microbatches=num_microbatches, **options)
    rows = local_rows(data, dist.get_rank(), dist.get_world_size()) if parallel else data
    metrics = [trainer.step(rows) for _ in range(num_steps)]
    return module.weight.detach(), metrics[-1]


def uneven_mask():
    mask = torch.zeros(24)
    mask[[0, 1, 2, 3, 4, 11, 23]] = 1
    return mask


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("loss", ["mean", "weighted"])
def test_training_does_not_depend_on_ranks_and_microbatches(ranks, loss, num_microbatches):
    data = batch() | {"mask": uneven_mask()}
    loss_fn = masked_loss if loss == "weighted" else mean_loss
    alone, expected = trained(loss_fn, data, num_steps=3)
    for weight, metrics in ranks.run(trained, loss_fn, data, num_microbatches, 3, num_ranks=4):
        # Three Adam steps of 0.1 in float32: a gradient's rounding of 1e-7 moves a weight by up to 1e-5.
        torch.testing.assert_close(weight, alone, rtol=0, atol=1e-5)
        assert metrics == pytest.approx(expected, rel=1e-5)


def test_a_weighted_loss_is_the_mean_over_the_examples_that_count():
    data, mask = batch(), uneven_mask()
    counted = {name: value[mask > 0] for name, value in data.items()}
    module = linear()
    expected = ((module(counted["x"]) - counted["y"]) ** 2).sum(1).mean().item()
    _, metrics = trained(masked_loss, data | {"mask": mask}, num_microbatches=2)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_batch_of_no_weight_has_loss_zero_and_updates_nothing():
    weight, metrics = trained(masked_loss, batch() | {"mask": torch.zeros(24)})
    assert metrics == {"loss": 0, "grad_norm": 0}
    assert torch.equal(weight, linear().weight)


def test_an_unused_parameter_decays():
    module = linear()
    module.unused = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    torchref.Trainer(mean_loss, optimizer, module).step(batch())
    torch.testing.assert_close(module.unused.detach(), torch.full((3,), 1 - 0.1 * 0.5))


def test_clipping_is_by_the_norm_without_an_epsilon():
    module, plain = linear(), linear()
    mean_loss(plain, batch()).backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in plain.parameters())).item()
    trainer = torchref.Trainer(mean_loss, torch.optim.SGD(module.parameters(), lr=1.0), module, max_grad_norm=norm / 2)
    before = copy.deepcopy(module.weight.detach())
    assert trainer.step(batch())["grad_norm"] == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(module.weight.detach(), before - plain.weight.grad / 2, rtol=1e-6, atol=1e-7)


def fail_once_then_train():
    """A step that raises during the backward must not affect the steps after it."""
    module = nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 5))
    trainer = torchref.Trainer(mean_loss, torch.optim.SGD(module.parameters(), lr=0.0), torchref.OverlappedDDP(module))

    def fail(*_):
        raise KeyError("in the middle")

    data = batch() | {"x": batch()["x"].requires_grad_(True)}
    first = trainer.step(data)
    handle = module[0].register_full_backward_hook(fail)
    with pytest.raises(KeyError):
        trainer.step(data)
    handle.remove()
    return first == trainer.step(data)


def test_a_failed_step_can_be_followed_by_another(ranks):
    assert all(ranks.run(fail_once_then_train, num_ranks=2))


def test_the_norm_ignores_stale_gradients_outside_of_the_optimizer():
    module = nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 5))
    trainer = torchref.Trainer(mean_loss, torch.optim.SGD(module[1].parameters(), lr=0.0), module)
    assert trainer.step(batch()) == trainer.step(batch())


def test_bad_input():
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"num_microbatches \(=0\) must be a positive integer"):
        torchref.Trainer(mean_loss, optimizer, module, num_microbatches=0)
    with pytest.raises(ValueError, match=r"max_grad_norm \(=0\) must be positive or None"):
        torchref.Trainer(mean_loss, optimizer, module, max_grad_norm=0)
    trainer = torchref.Trainer(mean_loss, optimizer, module, num_microbatches=5)
    with pytest.raises(ValueError, match=r"batch \(=24 examples\) must be divisible by .* \(=1 x 5\)$"):
        trainer.step(batch())
    with pytest.raises(ValueError, match=r"batch tensors must agree in length, they have \{'x': 24, 'y': 3\}$"):
        trainer.step(batch() | {"y": torch.ones(3, 5)})
    with pytest.raises(ValueError, match=r"batch \(=0 examples\) must be divisible"):
        trainer.step(batch(0))
    with pytest.raises(ValueError, match=r"batch \(=24 examples\) must be divisible by the number of parts \(=7\)"):
        local_rows(batch(), 0, 7)


@pytest.mark.parametrize(
    ("result", "found"),
    [(torch.ones(3), r"\(3,\)"), (1.0, "float"), (torchref.Weighted(torch.ones(2), torch.ones(())), r"\(2,\)")],
)
def test_invalid_losses(result, found):
    module = linear()
    trainer = torchref.Trainer(lambda net, batch: result, torch.optim.SGD(module.parameters(), lr=0.1), module)
    with pytest.raises(
        ValueError, match=f"loss_fn returned {found}: the loss must be a scalar tensor or torchref.Weighted"
    ):
        trainer.step(batch())
