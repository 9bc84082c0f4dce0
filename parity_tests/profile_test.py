"""A profile that torch itself has recorded is read as those of JAX are."""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from torchref.launch import shared_pool


def profiled(folder):
    small, large, square = torch.ones(1000), torch.ones(2**20), torch.ones(64, 64)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for tensor in (small, large) * 3:
            dist.all_reduce(tensor)
            square @ square
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))


def test_a_profile_of_torch_shows_what_gloo_reduced(tmp_path):
    from jaxddp.instruments.trace import read_trace  # not on the ranks, which import this file

    shared_pool().run(profiled, tmp_path, num_ranks=2)
    trace = read_trace(tmp_path)
    assert len(trace.overlaps()) == 2
    found = [(*key, len(times_us)) for key, times_us in trace.collectives().items()]
    assert found == [("all-reduce", 4000, 2, 6), ("all-reduce", 2**22, 2, 6)]
    assert trace.kinds()["products"][0] >= 12  # of two ranks
    for one in trace.overlaps().values():
        assert 0 < one.exposed_us <= one.communication_us < one.span_us
