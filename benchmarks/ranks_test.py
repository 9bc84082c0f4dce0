"""Ranks of every kind run the same function, over one mesh; what this machine has not is refused."""

import os

import jax
import numpy as np
import pytest
import torch.distributed as dist
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import ranks
from benchmarks.ranks import Ranks, choose_ranks, gather


def total(of, start):
    """Sums start + 0, start + 1, ... over the ranks, in JAX; and what the process was started with."""
    mesh = of.mesh()
    values = np.arange(mesh.size, dtype=np.float32) + start
    by_rank = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_callback(values.shape, by_rank, lambda index: values[index])
    add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=by_rank.spec, out_specs=PartitionSpec())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    said = [cores, os.environ.get("MALLOC_ARENA_MAX"), os.environ.get("NPROC"), os.environ.get("NVIDIA_TF32_OVERRIDE")]
    return mesh.size, jax.process_count(), float(jax.jit(add)(x)[0]), gather([dist.get_rank(), *said])


@pytest.mark.parametrize(("kind", "num_processes"), [("simulated", 1), ("processes", 2)])
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


def with_gpus(monkeypatch, of_torch, of_jax=None):
    monkeypatch.setattr("torch.cuda.device_count", lambda: of_torch)
    monkeypatch.setattr(ranks, "_count_jax_gpus", lambda: of_torch if of_jax is None else of_jax)


def test_all_gpus_are_taken_that_both_frameworks_find(monkeypatch):
    with_gpus(monkeypatch, 8, of_jax=4)
    assert choose_ranks(None, None, default=2) == Ranks(4, "gpus")
    assert choose_ranks(3, "gpus", default=2) == Ranks(3, "gpus")
    assert choose_ranks(None, "simulated", default=2) == Ranks(2, "simulated")
    with pytest.raises(ValueError, match=r"^ranks \(=5\) must be at most the number of GPUs \(=4\)$"):
        choose_ranks(5, None, default=2)
    with_gpus(monkeypatch, 2, of_jax=0)
    assert choose_ranks(None, None, default=2) == Ranks(2, "processes")
    with pytest.raises(ValueError, match="torch finds 2"):
        choose_ranks(None, "gpus", default=2)


def test_more_ranks_than_there_is_room_for_are_refused(monkeypatch):
    with_gpus(monkeypatch, 0)
    monkeypatch.setattr(ranks, "free_memory_bytes", lambda: 2 * 2**30 + 1)
    assert choose_ranks(4, "processes", default=2).num == 4
    with pytest.raises(ValueError, match=r"^ranks \(=5\) must be at most 4: each takes 0.5 GiB, 2.0 GiB are free$"):
        choose_ranks(5, None, default=2)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("print('a warning'); print(3)", 3),
        ("raise SystemExit('no driver')", 0),
        ("import time; time.sleep(60)", 0),
        # JAX would take three quarters of each GPU, only to be counted.
        ("import os; print(int(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'))", 1),
    ],
)
def test_jax_counts_its_gpus_in_a_process_of_its_own(program, found, monkeypatch):
    monkeypatch.setattr(ranks, "_COUNT_GPUS", program)
    monkeypatch.setattr(ranks, "_COUNT_TIMEOUT_S", 0.5 if "sleep" in program else 30.0)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    ranks._count_jax_gpus.cache_clear()
    assert ranks._count_jax_gpus() == found
    ranks._count_jax_gpus.cache_clear()
