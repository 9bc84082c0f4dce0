"""Compressed gradients: their values, their state, and the bytes sent, on the ranks of a pool."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.communication import compression
from torchref.communication.collectives import record
from torchref.communication.low_rank import is_worth_it, orthonormal
from torchref.strategy import planned_collectives

NUM_RANKS = 4
SHAPES = {"a": (12, 10), "b": (10,), "c": (8, 3, 2)}  # factors of rank 2 are smaller than "a" and "c"
WRAPPERS = {
    "naive": {},
    "flat": {},
    "overlapped": {},
    "bucketed": {"bucket_mb": 2e-4},
    "zero1": {"bucket_mb": 2e-4, "optimizer_cls": torch.optim.SGD, "lr": 1.0},
    "zero2": {"bucket_mb": 2e-4, "optimizer_cls": torch.optim.SGD, "lr": 1.0},
}
REPLICATED = ("naive", "flat", "overlapped", "bucketed")
BF16_ROUNDING, FP16_ROUNDING = 2.0**-8, 2.0**-11  # half of the last place, of 8 and 11 bits
FP16_LEAST = 2.0**-25  # half of the last place below 2^-14


class Linear(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, grads):
        return sum((parameter * grads[name]).sum() for name, parameter in self.named_parameters())


def gradients(rank, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mean(grads, names=SHAPES):
    return {name: torch.stack([one[name] for one in grads]).mean(0) for name in names}


def move(net, grads, denominator=None):
    """One step against the averaged gradient."""
    net.zero_grad()
    net(grads).backward()
    net.finish_gradient_synchronization(denominator)
    if hasattr(net, "step"):
        return net.step()
    with torch.no_grad():
        for parameter in net.module.parameters():
            parameter.sub_(parameter.grad)


def step_on_rank(name, how, grads, denominators=(None,)):
    """Takes a step for each gradient; the movement, memory, planned collectives, and whether they were issued."""
    net = torchref.make_strategy(name, Linear(), compression=how(), **WRAPPERS[name])
    for step, denominator in enumerate(denominators):
        with record() as issued:
            move(net, grads[dist.get_rank()][step], denominator)
    moved = {key: -parameter.detach() for key, parameter in net.module.named_parameters()}
    planned = planned_collectives(net)
    return moved, net.memory, planned, sorted(issued) == sorted(planned)


def bf16():
    return compression.bf16


def fp16():
    return compression.fp16


def powersgd():
    return compression.powersgd(2)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("how, rounding, least", [(bf16, BF16_ROUNDING, 0), (fp16, FP16_ROUNDING, FP16_LEAST)])
def test_casts_round_once_per_summand_and_sum(ranks, name, how, rounding, least):
    grads = [gradients(rank) for rank in range(NUM_RANKS)]
    for moved, _, planned, is_sent in ranks.run(step_on_rank, name, how, [[one] for one in grads], num_ranks=NUM_RANKS):
        assert is_sent
        # Sharded over 4 ranks, "b" is padded by 2. Parameters are not compressed.
        assert sum(size for kind, size in planned if kind == "all-reduce") in (0, 2 * 178)
        assert sum(size for kind, size in planned if kind == "reduce-scatter") in (0, 2 * 180)
        assert sum(size for kind, size in planned if kind == "all-gather") in (0, 4 * 180)
        for key, exact in mean(grads).items():
            off, size = (moved[key] - exact).abs(), mean([{key: grad[key].abs()} for grad in grads], [key])[key]
            # Each summand is rounded once, and each of N - 1 sums and the result: of no more than all absolute values.
            assert (off <= (NUM_RANKS + 1) * (rounding * size + least)).all()
            assert off.max() > rounding / 8 * exact.abs().max()  # it was rounded indeed


def test_float16_sums_do_not_overflow(ranks):
    grads = {name: torch.full(shape, 60_000.0) for name, shape in SHAPES.items()}
    for moved, *_ in ranks.run(step_on_rank, "flat", fp16, [[grads]] * NUM_RANKS, num_ranks=NUM_RANKS):
        for name in SHAPES:  # the sum of 240,000 is above 65,504; 60,000 and its quarter are float16 numbers
            assert torch.equal(moved[name], grads[name])


@pytest.mark.parametrize("name", REPLICATED)
def test_the_sum_of_errors_is_the_gradient_that_was_not_sent(ranks, name):
    """Also over steps with very different denominators: the error must not depend on them."""
    denominators = (4.0, 400.0, 0.04)
    grads = [[gradients(rank, step) for step in range(3)] for rank in range(NUM_RANKS)]
    results = ranks.run(step_on_rank, name, powersgd, grads, denominators, num_ranks=NUM_RANKS)
    moved, memory, planned, is_sent = results[0]
    assert is_sent
    # Of "a" 12 x 2 and 10 x 2, of "c" 8 x 2 and 6 x 2, and all 10 of "b".
    assert sum(size for _, size in planned) == 4 * (24 + 20 + 16 + 12 + 10)
    assert len(planned) == {"naive": 5, "overlapped": 5, "flat": 2, "bucketed": 5}[name]
    assert set(memory) == {"a", "c"}
    for key in SHAPES:
        error = sum(result[1][key].error for result in results) if key in memory else torch.zeros(())
        sums = [sum(grads[rank][step][key] for rank in range(NUM_RANKS)) for step in range(3)]
        expected = sum(total / denominator for total, denominator in zip(sums, denominators, strict=True))
        # rel: float32 sums, of numbers up to 300 where sums were divided by 0.04.
        torch.testing.assert_close(moved[key] + error, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        for result in results[1:]:
            assert torch.equal(result[0][key], moved[key])
            assert key not in memory or torch.equal(result[1][key].factor, memory[key].factor)


def train_with_zero_weight():
    """Whether parameters or state change in a step whose total weight is 0."""
    net = torchref.make_strategy("flat", Linear(), compression=powersgd())
    tx = torch.optim.SGD(net.parameters(), lr=1.0)

    def loss_fn(net, batch):
        return torchref.Weighted(net(gradients(dist.get_rank())) * batch["weight"].sum(), batch["weight"].sum())

    trainer = torchref.Trainer(loss_fn, tx, net)
    trainer.step({"weight": torch.ones(1)})
    before = [*net.module.parameters(), *(part for memory in net.memory.values() for part in memory)]
    before = [one.detach().clone() for one in before]
    trainer.step({"weight": torch.zeros(1)})
    after = [*net.module.parameters(), *(part for memory in net.memory.values() for part in memory)]
    return [torch.equal(one, other) for one, other in zip(before, after, strict=True)], any(map(torch.any, before))


def test_a_step_of_weight_zero_changes_nothing(ranks):
    assert ranks.run(train_with_zero_weight, num_ranks=2) == [([True] * 7, True)] * 2


def wrap_in_sharding_strategies():
    """The messages of strategies that shard gradients."""
    messages = []
    for name in ("zero1", "zero2", "zero3"):
        options = {} if name == "zero3" else {"optimizer_cls": torch.optim.SGD, "lr": 1.0}
        try:
            torchref.make_strategy(name, nn.Linear(3, 3), compression=powersgd(), **options)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_powersgd_needs_full_gradients(ranks):
    for messages in ranks.run(wrap_in_sharding_strategies, num_ranks=2):
        assert len(messages) == 3
        assert all(line.startswith("compression (='powersgd:2') must") and "\n" not in line for line in messages)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "4", None])
def test_invalid_ranks_of_factors(rank):
    with pytest.raises(ValueError, match=rf"^rank \(={rank!r}\) must be a positive integer$"):
        compression.powersgd(rank)


@pytest.mark.parametrize("least", [0.5, float("inf"), float("nan"), "2"])
def test_invalid_min_compression(least):
    with pytest.raises(ValueError, match=rf"^min_compression \(={least!r}\) must be a finite number of at least 1$"):
        compression.powersgd(4, min_compression=least)


def test_columns_become_orthonormal_or_zero():
    a, b = torch.randn(2, 40, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = orthonormal(torch.cat([a, 3 * a, b, a - 2 * b, a + 1e-6 * b.flip(0)], dim=1))
    assert [bool(column.any()) for column in basis.T] == [True, False, True, False, True]
    kept = basis[:, [0, 2, 4]]
    # float64 sums of 40 products.
    torch.testing.assert_close(kept.T @ kept, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-14)


def test_which_shapes_are_factored():
    assert is_worth_it((64, 64), 4) and is_worth_it((64, 8, 8), 4)  # 512 < 4096, all dimensions but the first together
    assert not is_worth_it((64,), 1) and not is_worth_it((), 1) and not is_worth_it((64, 1), 1)
    assert is_worth_it((64, 64), 4, 7.9) and not is_worth_it((64, 64), 4, 8)
