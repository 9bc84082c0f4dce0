"""Ranks of every kind run the same function, over one mesh; what this machine has not is refused."""

import os

import jax
import numpy as np
import pytest
import torch.distributed as dist
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import ranks
from benchmarks.ranks import Ranks, choose_ranks, free_bytes, gather, mesh_of
from jaxddp.comparison_test import mostly_full
from jaxddp.processes.job import Job
from torchref.launch import shared_pool


def total(of, start):
    """Sums start + 0, start + 1, ... over the ranks, in JAX; and what the process was started with."""
    mesh = mesh_of(of)
    values = np.arange(mesh.size, dtype=np.float32) + start
    by_rank = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_callback(values.shape, by_rank, lambda index: values[index])
    add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=by_rank.spec, out_specs=PartitionSpec())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    said = [cores, os.environ.get("MALLOC_ARENA_MAX"), os.environ.get("NPROC"), os.environ.get("NVIDIA_TF32_OVERRIDE")]
    return mesh.size, jax.process_count(), float(jax.jit(add)(x)[0]), gather([dist.get_rank(), *said])


KINDS = [("simulated", 1), ("processes", 2)]


@pytest.mark.parametrize(("kind", "num_processes"), mostly_full(KINDS[:1], KINDS))
def test_jax_runs_on_ranks_of_a_kind(kind, num_processes, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    for name in ("MALLOC_ARENA_MAX", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    size, count, summed, of_ranks = Ranks(2, kind).run(total, 5.0, in_jax=True, say=print)
    assert (size, count, summed) == (2, num_processes, 11.0)
    # On CPUs a rank has one core, XLA's pool a second thread, and freed memory is kept.
    cores = min(2, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 0
    own = [1, "1", "2", None] if kind == "processes" else [cores, "1", None, None]
    assert of_ranks == [[rank, *own] for rank in range(num_processes)]
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "1" and "MALLOC_ARENA_MAX" not in os.environ


def test_all_gpus_are_taken_that_both_frameworks_find(monkeypatch):
    monkeypatch.setattr(ranks, "num_gpus", lambda: 4)
    assert choose_ranks(None, None, default=2) == Ranks(4, "gpus")
    assert choose_ranks(3, "gpus", default=2) == Ranks(3, "gpus")
    assert choose_ranks(None, "simulated", default=2) == Ranks(2, "simulated")
    with pytest.raises(ValueError, match=r"^ranks \(=5\) must be at most the number of GPUs \(=4\)$"):
        choose_ranks(5, None, default=2)
    monkeypatch.setattr(ranks, "num_gpus", lambda: 0)
    assert choose_ranks(None, None, default=2) == Ranks(2, "processes")
    with pytest.raises(ValueError, match="torch finds 0"):
        choose_ranks(None, "gpus", default=2)


def free_in_a_job():
    """What is free in a job whose first host runs 4 of its processes, and whose other host 1."""
    num_local, free = ((4, 100), (1, 30))[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_job", Job("SLURM", 5, 0, num_local, 0, 2, "host", 1))
        patch.setattr(ranks, "free_memory_bytes", lambda: free)
        return gather(free_bytes("processes"))


def test_every_rank_of_a_job_finds_the_same_memory_free():
    of_ranks, _ = shared_pool().run(free_in_a_job, num_ranks=2)
    assert of_ranks == [25, 25]


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("print('a warning'); print(3)", 3),
        ("raise SystemExit('no driver')", 0),
        # JAX would take three quarters of each GPU, only to be counted.
        ("import os; print(int(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'))", 1),
    ],
)
def test_jax_counts_its_gpus_in_a_process_of_its_own(program, found, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(ranks, "_COUNT_GPUS", program)
    assert ranks.num_gpus.__wrapped__() == found
