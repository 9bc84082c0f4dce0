"""The trainer: weighted losses, accumulation, clipping and invalid arguments."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.clipping import global_norm
from torchref.passes_test import refused
from torchref.registry import make_training
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
def test_weighted_training_does_not_depend_on_ranks_and_microbatches(ranks, num_microbatches):
    data = batch() | {"mask": uneven_mask()}
    alone, expected = trained(masked_loss, data, num_steps=3)
    for weight, metrics in ranks.run(trained, masked_loss, data, num_microbatches, 3, num_ranks=4):
        # Three Adam steps of 0.1 in float32: a gradient's rounding of 1e-7 moves a weight by up to 1e-5.
        torch.testing.assert_close(weight, alone, rtol=0, atol=1e-5)
        assert metrics == pytest.approx(expected, rel=1e-5)


def test_a_batch_of_no_weight_has_loss_zero_and_updates_nothing():
    weight, metrics = trained(masked_loss, batch() | {"mask": torch.zeros(24)})
    assert metrics == {"loss": 0, "grad_norm": 0}
    assert torch.equal(weight, linear().weight)


def test_a_batch_may_be_a_tuple():
    _, of_dict = trained(mean_loss, batch(), num_microbatches=2)
    pair = batch()["x"], batch()["y"]
    _, of_tuple = trained(lambda net, b: mean_loss(net, {"x": b[0], "y": b[1]}), pair, num_microbatches=2)
    assert of_dict == of_tuple


def test_nothing_is_read_before_the_update(monkeypatch):
    read, events = torch.Tensor.__float__, []
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: (events.append("read"), read(tensor))[1])
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: events.append("step"))
    torchref.Trainer(mean_loss, optimizer, module, max_grad_norm=1.0).step(batch())
    assert events == ["step", "read", "read"]


def leaking_weight(net, batch):
    return torchref.Weighted(mean_loss(net, batch), net(batch["x"]).sigmoid().sum())


def at_times_weighted(net, part):
    loss = mean_loss(net, part)
    return loss if torch.equal(part["x"], batch()["x"][:12]) else torchref.Weighted(loss, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("said", "loss_fn", "data", "options"),
    [
        (r"num_microbatches \(=0\) must be a positive integer", mean_loss, batch(), {"num_microbatches": 0}),
        (r"max_grad_norm \(=0\) must be a positive", mean_loss, batch(), {"max_grad_norm": 0}),
        (r"batch \(=24 examples\) must be divisible by .* \(=5\)", mean_loss, batch(), {"num_microbatches": 5}),
        (r"batch must be tensors whose dimension 0 counts .*24.*3", mean_loss, batch() | {"y": torch.ones(3, 5)}, {}),
        ("the weight of torchref.Weighted must not depend on parameters", leaking_weight, batch(), {}),
        ("loss_fn must return torchref.Weighted for all micro-", at_times_weighted, batch(), {"num_microbatches": 2}),
        (r"loss_fn returned \(3,\): the loss must be a scalar", lambda *_: torch.ones(3), batch(), {}),
    ],
)
def test_bad_input(said, loss_fn, data, options):
    with pytest.raises(ValueError, match=f"^{said}"):
        trained(loss_fn, data, **options)


def negative_on_one_rank(net, batch):
    return torchref.Weighted(mean_loss(net, batch), torch.tensor((9.0, -1.0)[dist.get_rank()]))


def wrong_arguments():
    net = torchref.FlatDDP(linear())
    trainer = torchref.Trainer(negative_on_one_rank, torch.optim.SGD(net.parameters(), 0.1), net)
    assert refused(lambda: trainer.step(batch()), "the weights of torchref.Weighted (=nan in all) must be finite")
    module = linear()
    torchs = nn.parallel.DistributedDataParallel(module)
    trainer = torchref.Trainer(masked_loss, torch.optim.SGD(module.parameters(), 0.1), torchs)
    masked = batch() | {"mask": uneven_mask()}
    assert refused(lambda: trainer.step(masked), "net (=DistributedDataParallel) must be BucketedDDP for Weighted")
    owners = torchref.ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    torchref.Trainer(mean_loss, owners, torchs)
    assert refused(lambda: torchref.Trainer(mean_loss, owners, module), "net (=Linear) must be wrapped")
    assert refused(lambda: net.finish_gradient_synchronization(0), "denominator (=0) must be a positive finite number")


def test_a_wrong_argument_is_one_line_on_all_ranks(ranks):
    ranks.run(wrong_arguments, num_ranks=2)


def steps_with_nan(strategy, is_nan):
    """What each step said, and whether it changed nothing; rank 1's rows alone hold NaN, in the steps that say so."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    net, optimizer = make_training(strategy, module, torch.optim.Adam, {}, lr=0.1)
    state = (net.optimizer if net.owns_optimizer else optimizer).state
    trainer = torchref.Trainer(lambda net, batch: net(batch["x"]).square().mean(), optimizer, net, nonfinite="skip")

    def held():
        tensors = [*net.parameters(), *net.buffers(), *(value for one in state.values() for value in one.values())]
        return [tensor.detach().clone() for tensor in tensors]

    found = []
    for step, has_nan in enumerate(is_nan):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        if has_nan and dist.get_rank() == 1:
            x[2, 1] = torch.nan
        before = held()
        said = trainer.step({"x": x})["skipped"]
        after = held()
        found.append((said, len(before) == len(after) and all(map(torch.equal, before, after))))
    return found


@pytest.mark.parametrize("strategy", ["bucketed", "zero1", "zero3"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_and_touches_nothing(ranks, strategy):
    is_nan = [False, True, False, True, True]
    for found in ranks.run(steps_with_nan, strategy, is_nan, num_ranks=2):
        assert found == [(0.0, False), (1.0, True), (0.0, False), (1.0, True), (1.0, True)]


class Seen(nn.Module):
    """Keeps the largest input, which no loss depends on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(x.max())
        return x.clamp(max=1) @ self.weight


def steps_with_infinite_buffer(wrapper):
    net = wrapper(Seen(), broadcast_buffers=False)
    loss_fn, optimizer = lambda net, batch: net(batch["x"]).mean(), torch.optim.SGD(net.parameters(), 0.1)
    trainer = torchref.Trainer(loss_fn, optimizer, net, nonfinite="skip")
    found = []
    for largest in (2.0, torch.inf, 3.0):
        x = torch.ones(2, 3)
        x[0, 0] = largest if dist.get_rank() == 1 else 1.0
        found.append((trainer.step({"x": x})["skipped"], net.module.largest.item()))
    return found, net.module.weight.tolist()


@pytest.mark.parametrize("wrapper", [torchref.BucketedDDP, nn.parallel.DistributedDataParallel])
def test_a_buffer_of_one_rank_that_no_longer_is_finite_is_as_before_and_all_skip(ranks, wrapper):
    (first, one), (second, other) = ranks.run(steps_with_infinite_buffer, wrapper, num_ranks=2)
    assert first == [(0.0, 1.0), (1.0, 1.0), (0.0, 1.0)] and second == [(0.0, 2.0), (1.0, 2.0), (0.0, 3.0)]
    assert one == other == pytest.approx([0.8] * 3)


def test_the_norm_of_16_bit_gradients_is_summed_in_float32():
    assert global_norm([torch.full((4,), 60000.0, dtype=torch.float16)]) == 120000  # above the largest float16
    mixed = torch.full((2,), 3.0, dtype=torch.bfloat16), torch.full((1,), 2**-9)
    assert global_norm(mixed) == pytest.approx(math.sqrt(18 + 2**-18), rel=1e-6)  # bfloat16 gives 4.25
