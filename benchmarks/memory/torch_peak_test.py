"""What a rank of torchref holds, counted over all tensors that there are, as no GPU is here to count."""

import gc

import pytest
import torch

from benchmarks.memory.torch_peak import Counter, allocate_on_rank, allocate_torch
from benchmarks.memory.variants import Allocation, MemorySetup
from torchref.conftest import ranks as ranks
from torchref.models import SIZES


def tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def allocate(name):
    return allocate_on_rank(MemorySetup("tiny", "h100:2", 2, (name,), 4), name, Counter(tensor_bytes, tensor_bytes))


# Of parameters, in float32: what AdamW keeps, whole or its rank's half; and with stage 3 the rank's half of all.
@pytest.mark.parametrize(
    ("name", "after_init", "after_step"), [("naive", 1, 3), ("bucketed", 1, 3), ("zero1", 1, 2), ("zero3", 0.5, 1.5)]
)
def test_a_rank_holds_what_its_stage_says(ranks, name, after_init, after_step):
    params = 4 * SIZES["tiny"].num_params
    for found in ranks.run(allocate, name, num_ranks=2):
        assert isinstance(found, Allocation) and found.num_ranks == 2
        assert params * after_init <= found.after_init
        # Gradients stay until the next step zeroes them; they and buckets are at most twice the parameters.
        assert params * after_step <= found.after_step <= params * (after_step + 2) + 4096


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert allocate_torch(MemorySetup("tiny", "h100:2", 2, ("naive",), 4), "naive") == "torch finds no GPU"
