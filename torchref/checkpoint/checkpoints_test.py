"""Checkpoints of any strategy on any number of ranks: what they restore, and what is left when something fails."""

import functools
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchref
from torchref.checkpoint import Checkpoints
from torchref.passes_test import refused
from torchref.registry import make_training

NUM_STEPS, SAVED_AT = 6, 3


class Model(nn.Module):
    """Linears, one of them tied and one frozen; uneven sizes; a scalar; nothing; a buffer that training changes."""

    def __init__(self, bias=True):
        super().__init__()
        self.first = nn.Linear(5, 7, bias=bias, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(7, dtype=torch.float64)
        self.last = nn.Linear(7, 5, dtype=torch.float64)
        self.tied = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(7, 7, dtype=torch.float64).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x):
        hidden = self.norm(self.frozen(torch.tanh(self.first(x))))
        return self.last(torch.tanh(hidden) * self.scale + self.tied(x)) + self.empty.sum()


def trainer_of(strategy, seed=0, optimizer_cls=torch.optim.AdamW, model=Model, **options):
    torch.manual_seed(seed)
    module, settings = model(), {"lr": 0.02} | ({"momentum": 0.9} if optimizer_cls is torch.optim.SGD else {})
    net, optimizer = make_training(strategy, module, optimizer_cls, options, **settings)
    return torchref.Trainer(loss_fn, optimizer, net)


def loss_fn(net, batch):
    return (net(batch["x"]) - batch["y"]).square().mean()


def take_steps(trainer, first, last):
    for step in range(first, last):
        x, y = (torch.from_numpy(rows) for rows in np.random.default_rng(step).normal(size=(2, 6, 5)))
        trainer.step({"x": x, "y": y})  # the same on all ranks, as BatchNorm's statistics are of a rank's rows


def weights_of(trainer):
    found = {name: tensor.double().numpy() for name, tensor in trainer.net.gather_full_params().items()}
    return found | {name: buffer.double().numpy() for name, buffer in trainer.net.module.named_buffers()}


# On the ranks


def train_and_save(folder, strategy, options):
    trainer = trainer_of(strategy, **options)
    with Checkpoints(folder) as checkpoints:
        take_steps(trainer, 0, SAVED_AT)
        checkpoints.save(trainer, SAVED_AT, data_position={"examples": 36})
    take_steps(trainer, SAVED_AT, NUM_STEPS)
    return weights_of(trainer)


def resume(folder, strategy, options):
    trainer = trainer_of(strategy, seed=1, **options)  # other weights
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(trainer)
    assert found == (SAVED_AT, {"examples": 36})
    take_steps(trainer, SAVED_AT, NUM_STEPS)
    return weights_of(trainer)


def error_of(folder, strategy, options, function, kind=ValueError):
    with Checkpoints(folder) as checkpoints:
        trainer = trainer_of(strategy, **options)
        return refused(lambda: function(checkpoints, trainer), kinds=kind)


def save_nan(checkpoints, trainer):
    with torch.no_grad():
        trainer.net.module.last.bias[2] = torch.nan
    checkpoints.save(trainer, 9)


def save_on_full_disk(checkpoints, trainer):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        checkpoints.save(trainer, 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def error_of_place(folder):
    """Each rank has a folder of its own, of which one or both hold checkpoints."""
    trainer = trainer_of("zero1")
    with Checkpoints(Path(folder) / str(dist.get_rank())) as checkpoints:
        found = []
        said = refused(lambda: found.extend((checkpoints.latest_step(), checkpoints.restore(trainer))))
        return said or found


def error_of_trainer(folder, kind):
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    outside = nn.Parameter(torch.ones(2))
    if kind == "ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # torch warns of its own use of torch.jit

        net = torchref.BucketedDDP(module)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    elif kind == "outside":
        net = torchref.BucketedDDP(module)
        optimizer = torch.optim.SGD([*net.parameters(), outside], lr=0.1)
    else:
        net = torchref.BucketedDDP(module) if kind == "positions" else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer, position = torchref.Trainer(loss_fn, optimizer, net), dist.get_rank() if kind == "positions" else 0
    return refused(lambda: Checkpoints(folder).save(trainer, 1, data_position=position))


def keep_bfloat16(folder):
    ours, other, theirs = (
        trainer_of(name, seed=seed, model=lambda: Model().bfloat16())
        for seed, name in enumerate(("bucketed", "zero2", "bucketed"))
    )
    moment = torch.full((5, 7), 1.001)
    ours.optimizer.state[ours.net.module.last.weight] = {"step": torch.tensor(1.0), "exp_avg": moment}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(ours, 1)
        for restored in (other, theirs):
            checkpoints.restore(restored)
            found = weights_of(restored)
            assert all((right == found[name]).all() for name, right in weights_of(ours).items())
    kept = theirs.optimizer.state[theirs.net.module.last.weight]["exp_avg"]
    torch.testing.assert_close(kept, moment, rtol=0, atol=0)


PAIRS = [
    ("bucketed", 2, "zero1", 3, torch.optim.Adagrad), ("zero1", 2, "zero3", 1, torch.optim.NAdam),
    ("zero3", 3, "zero2", 2, torch.optim.SGD), ("zero2", 1, "naive", 2, torch.optim.AdamW),
    ("flat", 3, "zero3", 2, torch.optim.NAdam), ("zero3", 2, "overlapped", 3, torch.optim.AdamW),
]  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize(("first", "num_ranks", "second", "num_others", "cls"), PAIRS)
def test_a_resumed_run_ends_as_the_undisturbed_one(ranks, tmp_path, first, num_ranks, second, num_others, cls):
    options = {"optimizer_cls": cls}
    expected = ranks.run(train_and_save, str(tmp_path), first, options, num_ranks=num_ranks)[0]
    for found in ranks.run(resume, str(tmp_path), second, options, num_ranks=num_others):
        assert found.keys() == expected.keys()
        for name in expected:  # float64: only the order of sums differs
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12)
    assert np.abs(expected["first.weight"] - Model().first.weight.detach().numpy()).max() > 1e-2


@pytest.fixture
def saved(ranks, tmp_path):
    ranks.run(train_and_save, str(tmp_path), "zero1", {}, num_ranks=2)
    return tmp_path


def test_the_file_is_one_of_torch_and_holds_whole_tensors(saved):
    assert Checkpoints(saved).steps() == [SAVED_AT]
    tensors = torch.load(saved / str(SAVED_AT) / "state.pt", weights_only=True)
    assert tensors["params.first.weight"].shape == tensors["state.exp_avg.first.weight"].shape == (7, 5)
    assert tensors["buffers.norm.running_mean"].shape == (7,) and tensors["state.step.scale"] == SAVED_AT
    about = Checkpoints(saved).about(SAVED_AT)
    assert (about["strategy"], about["num_ranks"], about["step"]) == ("zero1", 2, SAVED_AT)
    assert about["data_position"] == {"examples": 36}


def test_other_models_and_optimizers_are_refused(ranks, saved):
    where = f"checkpoint of step {SAVED_AT} in '{saved}'"
    missing = "params.first.bias is torch.float64 (7,) there and missing here"
    for options, expected in (
        ({"model": functools.partial(Model, bias=False)}, f"{where} is of another model: {missing}"),
        ({"optimizer_cls": torch.optim.SGD}, f"{where} is of another optimizer: AdamW there and SGD here"),
        ({"optimizer_cls": torch.optim.Adam}, ""),  # keeps the same state
    ):
        found = ranks.run(error_of, str(saved), "zero3", options, Checkpoints.restore, num_ranks=2)
        assert found == [expected] * 2


def test_a_refused_save_leaves_what_is_there_on_all_ranks(ranks, saved):
    found = ranks.run(error_of, str(saved), "bucketed", {}, save_nan, FloatingPointError, num_ranks=2)
    assert found == ["state of step 9 must be finite to be saved: params.last.bias is not"] * 2
    assert sorted(os.listdir(saved)) == [".writer", str(SAVED_AT)]


def test_a_full_disk_is_one_error_on_all_ranks_and_leaves_no_partial_file(ranks, tmp_path):
    found = ranks.run(error_of, str(tmp_path), "bucketed", {}, save_on_full_disk, OSError, num_ranks=2)
    assert found == [f"checkpoint of step 9 in '{tmp_path}' was not saved: File too large"] * 2
    assert os.listdir(tmp_path) == [".writer"]


def test_bfloat16_is_kept_bit_for_bit_and_moments_keep_their_dtype(ranks, tmp_path):
    ranks.run(keep_bfloat16, str(tmp_path), num_ranks=2)


def test_rank_0_alone_reads_and_decides_what_is_restored(ranks, tmp_path):
    mine = tmp_path / "0"
    ranks.run(train_and_save, str(mine), "zero1", {}, num_ranks=1)
    shutil.copytree(mine / str(SAVED_AT), mine / "7")
    (mine / "7" / "about.json").write_text("{")
    assert ranks.run(error_of_place, str(tmp_path), num_ranks=2) == [[7, (SAVED_AT, {"examples": 36})]] * 2
    shutil.rmtree(mine / str(SAVED_AT))
    damaged = f"checkpoint of step 7 in '{mine}' is damaged or half-written"
    assert ranks.run(error_of_place, str(tmp_path), num_ranks=2) == [damaged] * 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ZeroRedundancyOptimizer", "optimizer (=ZeroRedundancyOptimizer) must not keep a rank's state on that rank"),
        ("outside", "optimizer must update parameters of the module alone: others would not be saved"),
        ("apart", "net (=Linear on 1 ranks) must train on all 2 of the job"),
        ("positions", "data_position (=1 in rank 1) must be 0, as in rank 0"),
    ],
)
def test_state_that_would_be_lost_is_refused(ranks, tmp_path, kind, expected):
    assert ranks.run(error_of_trainer, str(tmp_path), kind, num_ranks=2) == [expected] * 2
    assert os.listdir(tmp_path) == []


def test_a_mask_is_no_fault_and_a_buffer_of_nan_is(tmp_path):
    module = nn.Linear(2, 2)
    trainer = torchref.Trainer(loss_fn, torch.optim.SGD(module.parameters(), lr=0.1), module)
    trainer.net.register_buffer("mask", torch.full((2, 2), -torch.inf))
    trainer.net.register_buffer("table", torch.zeros(3), persistent=False)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(trainer, 1)
    trainer.net.table = torch.zeros(5)
    assert checkpoints.restore(trainer)[0] == 1
    trainer.net.mask[0] = torch.nan
    with checkpoints, pytest.raises(FloatingPointError, match="buffers.mask is not"):
        checkpoints.save(trainer, 2)
