"""Masters under autocast, and scaled losses: the same bits where nothing overflows; where it does, a skipped step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref import loss_scale
from torchref.late_parameters_test import wrap
from torchref.train import local_rows

NAMES = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")


def batch(bad=None):
    generator = torch.Generator().manual_seed(0)
    data = {"x": torch.randn(16, 10, generator=generator), "y": torch.randn(16, 5, generator=generator)}
    if bad is not None:
        data["y"][9] = bad  # of rank 1; 3e4 makes float16 gradients infinite
    return data


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5))


def loss_fn(net, batch):
    out = net(batch["x"])
    return ((out.float() - batch["y"]) ** 2).mean() / 128  # or 2^16 times its gradient would be above 65504


def trained(name, batches, options):
    """Trains on this rank's rows; gives the full weights after each step, and the metrics."""
    net = torchref.FSDP(model(), options.pop("compute_dtype", None)) if name == "zero3" else wrap(name, model())
    optimizer = net if net.owns_optimizer else torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = torchref.Trainer(loss_fn, optimizer, net, **options)
    found = []
    for data in batches:
        metrics = trainer.step(local_rows(data, dist.get_rank(), dist.get_world_size()))
        full = net.gather_full_params() if name == "zero3" else dict(net.module.named_parameters())
        found.append(({key: weight.detach().clone() for key, weight in full.items()}, metrics))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_power_of_two_changes_no_bit(ranks, name):
    options = {"num_microbatches": 2, "max_grad_norm": 0.01}
    scaled = ranks.run(trained, name, [batch()] * 3, {"loss_scale": "dynamic", **options}, num_ranks=2)
    plain = ranks.run(trained, name, [batch()] * 3, options, num_ranks=2)
    for mine, other in zip(scaled, plain, strict=True):
        for (weights, metrics), (wanted, wanted_metrics) in zip(mine, other, strict=True):
            assert all(torch.equal(weights[key], wanted[key]) for key in wanted)
            assert metrics == wanted_metrics | {"loss_scale": 2.0**16, "skipped": 0.0}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_overflows_on_one_rank_is_skipped_by_all(ranks, name):
    batches = [batch(), batch(3e4), batch()]
    options = {"loss_scale": "dynamic", "compute_dtype": torch.float16}
    for steps in ranks.run(trained, name, batches, options, num_ranks=2):
        (first, _), (second, skipped), (third, metrics) = steps
        assert (skipped["skipped"], skipped["loss_scale"]) == (1, 2.0**16)
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert (metrics["skipped"], metrics["loss_scale"]) == (0, 2.0**15)
        assert not all(torch.equal(second[key], third[key]) for key in first)
        assert {weight.dtype for weight in third.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["bucketed", "zero2"])
def test_autocast_computes_in_its_dtype_and_loses_little(ranks, name):
    runs = [{"compute_dtype": dtype} for dtype in (torch.bfloat16, None)]
    narrow, wide = (ranks.run(trained, name, [batch()] * 10, options, num_ranks=2) for options in runs)
    (_, metrics), (_, wanted) = narrow[0][-1], wide[0][-1]
    assert metrics["loss"] != wanted["loss"]
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=1e-2)


def test_the_scale_grows_after_finite_steps_and_is_at_least_one(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 2)
    scale, found = loss_scale.LossScale(), []
    for is_finite in (True, True, False, True, False, False):
        scale.update(is_finite)
        found.append(scale.scale / 2**16)
    assert found == [1, 2, 1, 1, 0.5, 0.25]
    for _ in range(20):
        scale.update(False)
    assert scale == loss_scale.LossScale(1.0, 0)


def refusals_under_fsdp():
    with pytest.raises(ValueError, match=r"^compute_dtype \(=torch.float16\) must be given to FSDP, which gathers in"):
        net = torchref.FSDP(model())
        torchref.Trainer(loss_fn, torch.optim.SGD(net.parameters()), net, compute_dtype=torch.float16)


def test_refusals(ranks):
    ranks.run(refusals_under_fsdp, num_ranks=1)
    module = model()
    for options, said in (
        ({"loss_scale": 2}, r"^loss_scale \(=2\) must be 'dynamic' or None$"),
        ({"compute_dtype": torch.int8}, r"^compute_dtype \(=torch.int8\) must be a floating-point dtype or None$"),
    ):
        with pytest.raises(ValueError, match=said):
            torchref.Trainer(loss_fn, torch.optim.SGD(module.parameters()), module, **options)
