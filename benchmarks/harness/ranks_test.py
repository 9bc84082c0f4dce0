"""Ranks of either kind run the same function, over one mesh; bad ones are refused."""

import os

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.harness import ranks
from benchmarks.harness.ranks import Ranks, chosen_ranks, ranks_of_machine


def total(of, start):
    """Sums start + 0, start + 1, ... over the ranks."""
    mesh = of.mesh()
    values = np.arange(mesh.size, dtype=np.float32) + start
    by_rank = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_callback(values.shape, by_rank, lambda index: values[index])
    add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=by_rank.spec, out_specs=PartitionSpec())
    return mesh.size, jax.process_count(), float(jax.jit(add)(x)[0])


@pytest.mark.parametrize(
    ("kind", "num_processes"), [("simulated", 1), pytest.param("processes", 2, marks=pytest.mark.full)]
)
def test_jax_runs_on_ranks_of_a_kind(kind, num_processes):
    assert Ranks(2, kind).run_jax(total, 5.0) == [(2, num_processes, 11.0)] * num_processes


def manners(of):
    """What a rank's process was started with: its cores, what glibc and what XLA's pool were told."""
    return len(os.sched_getaffinity(0)), os.environ.get("MALLOC_ARENA_MAX"), os.environ.get("NPROC")


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes are kept to cores on Linux alone")
def test_a_rank_of_either_framework_has_a_core_and_keeps_its_memory(monkeypatch):
    for name in ("MALLOC_ARENA_MAX", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks(2, "processes").run_torch(manners) == [(1, "1", None)] * 2
    assert Ranks(2, "processes").run_jax(manners) == [(1, "1", "2")] * 2
    assert Ranks(2, "simulated").run_jax(manners) == [(min(2, len(os.sched_getaffinity(0))), "1", None)]
    assert not {"MALLOC_ARENA_MAX", "NPROC"} & os.environ.keys()


def gpus(monkeypatch, of_torch, of_jax=None):
    monkeypatch.setattr("torch.cuda.device_count", lambda: of_torch)
    monkeypatch.setattr(ranks, "count_jax_gpus", lambda: of_torch if of_jax is None else of_jax)


def test_gpus_are_taken_where_there_are_any(monkeypatch):
    gpus(monkeypatch, 0)
    assert ranks_of_machine(3) == Ranks(3, "simulated")
    assert ranks_of_machine(3, "processes") == Ranks(3, "processes")
    gpus(monkeypatch, 2)
    assert ranks_of_machine(3) == Ranks(2, "gpus")
    assert ranks_of_machine(3, "simulated") == Ranks(3, "simulated")
    assert ranks_of_machine(1).backend == {"jaxddp": "XLA over NCCL", "torchref": "NCCL"}


def test_all_gpus_are_taken_that_can_share_the_batch(monkeypatch):
    gpus(monkeypatch, 8)
    assert chosen_ranks(None, 2, batch_size=8) == Ranks(8, "gpus")
    assert chosen_ranks(None, 2, batch_size=12) == Ranks(6, "gpus")
    assert chosen_ranks(3, 2, batch_size=8) == Ranks(3, "gpus")  # said by hand, so that its error is theirs
    assert chosen_ranks(None, 2, "simulated", batch_size=8) == Ranks(2, "simulated")
    assert Ranks(6, "gpus").in_words == "6 ranks on 6 of 8 GPUs"
    gpus(monkeypatch, 1)
    assert chosen_ranks(None, 2, batch_size=8).in_words == "1 rank on 1 of 1 GPUs"
    gpus(monkeypatch, 0)
    assert chosen_ranks(None, 2, batch_size=8).in_words == "2 ranks"


def test_gpus_that_jax_cannot_use_are_not_taken_and_said(monkeypatch):
    gpus(monkeypatch, 2, of_jax=0)
    assert ranks_of_machine(2) == Ranks(2, "simulated")
    assert ranks_of_machine(2).in_words == "2 ranks (torch finds 2, JAX none: it takes .[cuda12] or .[cuda13])"
    rule = r"^ranks of kind 'gpus' need GPUs, and torch finds 2, JAX none: it takes \.\[cuda12\] or \.\[cuda13\]$"
    with pytest.raises(ValueError, match=rule):
        ranks_of_machine(2, "gpus")


def test_gpus_multiply_float32_in_float32(monkeypatch):
    monkeypatch.setattr("jaxddp.data_mesh", lambda num: num)
    before = jax.config.jax_default_matmul_precision
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # so that it is put back
    try:
        assert Ranks(1, "gpus").mesh() == 1
        assert jax.config.jax_default_matmul_precision == torch.get_float32_matmul_precision() == "highest"
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def test_jax_counts_its_gpus_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    ranks.count_jax_gpus.cache_clear()
    assert ranks.count_jax_gpus() == 0
    monkeypatch.setattr(ranks, "_COUNT_GPUS", "print('a warning'); print(3)")
    ranks.count_jax_gpus.cache_clear()
    assert ranks.count_jax_gpus() == 3
    monkeypatch.setattr(ranks, "_COUNT_GPUS", "raise SystemExit('no driver')")
    ranks.count_jax_gpus.cache_clear()
    assert ranks.count_jax_gpus() == 0
    monkeypatch.setattr(ranks, "_COUNT_GPUS", "import time; time.sleep(60)")
    monkeypatch.setattr(ranks, "_COUNT_TIMEOUT_S", 0.5)
    ranks.count_jax_gpus.cache_clear()
    assert ranks.count_jax_gpus() == 0
    ranks.count_jax_gpus.cache_clear()


def test_bad_ranks(monkeypatch):
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match=r"^ranks \(=0\) must be a positive integer$"):
        ranks_of_machine(0)
    with pytest.raises(
        ValueError, match=r"^unknown kind of ranks 'threads': one of simulated, processes, gpus, lab, job$"
    ):
        ranks_of_machine(2, "threads")
    with pytest.raises(ValueError, match=r"^ranks of kind 'gpus' need GPUs, and torch finds none$"):
        ranks_of_machine(2, "gpus")


def test_more_ranks_than_the_machine_has_room_for(monkeypatch):
    gpus(monkeypatch, 0)
    monkeypatch.setattr(ranks, "free_bytes", lambda kind: 2 * 2**30 + 1)
    assert ranks_of_machine(4).num == 4
    rule = r"^ranks \(=5\) must be at most 4: each takes 0.5 GiB for its process, 2.0 are free$"
    with pytest.raises(ValueError, match=rule):
        ranks_of_machine(5, "processes")
    gpus(monkeypatch, 2)
    assert chosen_ranks(None, 4) == Ranks(2, "gpus")
    with pytest.raises(ValueError, match=r"^ranks \(=3\) must be at most the number of GPUs \(=2\)$"):
        chosen_ranks(3, 4)


@pytest.mark.parametrize(
    ("is_process_per_host", "local_rank", "own"), [(False, 0, "2"), (False, 2, "5"), (True, 0, "2,3,5")]
)
def test_jaxs_processes_of_a_job_see_the_gpus_of_their_ranks_alone(is_process_per_host, local_rank, own, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"CUDA_VISIBLE_DEVICES": "2,3,5,7"})
    monkeypatch.setattr(ranks, "prepare_jax", lambda rank: None)
    # Three ranks on each host, which has four GPUs: the mesh has six devices, not eight.
    of_job = Ranks(6, "gpus", (), (3, 3), "10.0.0.1", is_process_per_host)
    ranks._prepare(of_job, True, 3, local_rank)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
