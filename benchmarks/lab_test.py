"""A lab carries what was asked for, leaves nothing behind, and says why there can be none.

Functions that ranks run stand at the top: other processes import them by name.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import lab as module
from benchmarks.lab import Host, Lab
from benchmarks.ranks import Ranks, choose_ranks
from benchmarks.ranks_test import total
from torchref.launch import RankError

OURS = f"jaxddp-lab.{os.getpid()}."


def fail(ranks):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError(f"no luck among {socket.if_nameindex()}")
    dist.barrier()  # for ever: one rank does not come


def seconds_of_one_mib(ranks):
    import torch
    import torch.distributed as dist

    megabyte = torch.ones(2**20 // 4)
    dist.all_reduce(megabyte)  # connects
    since = time.monotonic()
    dist.all_reduce(megabyte)
    return time.monotonic() - since


def namespaces(prefix=OURS):
    """Those of this process: others may have labs of their own meanwhile."""
    return sorted(path.name for path in Path("/run/netns").glob(f"{prefix}*"))


@pytest.mark.full
@pytest.mark.lab
def test_ranks_of_both_frameworks_meet_over_the_link():
    before = os.readlink("/proc/self/ns/net")
    with Lab(2, 1000) as lab:
        ranks = choose_ranks(None, "lab", default=2)
        assert ranks == Ranks(2, "lab", lab.hosts)
        assert ranks.run(total, 5.0, in_jax=True, say=print)[:3] == (2, 2, 11.0)
    assert os.readlink("/proc/self/ns/net") == before and namespaces() == []


@pytest.mark.lab
@pytest.mark.full
def test_a_link_carries_no_more_than_was_asked_for():
    with Lab(3, 20) as lab:
        # Each rank sends and receives 1 MiB, of which 256 KiB may go at once at either end of a link.
        took_s = choose_ranks(2, "lab", default=2).run(seconds_of_one_mib, in_jax=False, say=print)
        assert took_s > (2**20 - 2 * 256 * 1024) * 8 / 20e6
        assert choose_ranks(2, "lab", default=2).hosts == lab.hosts[:2]
        with pytest.raises(ValueError, match=r"^ranks \(=4\) must be at most the number of the lab's hosts \(=3\)$"):
            choose_ranks(4, "lab", default=2)


@pytest.mark.lab
@pytest.mark.full
def test_nothing_is_left_after_a_rank_that_fails():
    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: ValueError: no luck among .*'eth0'"), Lab(2, 1000):
        assert len(namespaces()) == 3
        choose_ranks(2, "lab", default=2).run(fail, in_jax=False, say=print)
    assert namespaces() == []


OWNER = """
import sys, time
from benchmarks.lab import Lab
lab = Lab(3, 1000)
lab.__enter__()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.lab
def test_what_a_killed_owner_leaves_is_removed_and_nothing_else():
    alive = f"jaxddp-lab.{os.getpid()}.77.bridge"
    others = [alive, f"of-another.{os.getpid()}", f"jaxddp-other.{os.getpid()}.0.bridge"]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    its = f"jaxddp-lab.{owner.pid}."
    try:
        assert owner.stdout.readline() == "open\n" and len(namespaces(its)) == 4
        for name in others:
            subprocess.run(["ip", "netns", "add", name], check=True)
        owner.kill()
        owner.communicate()
        assert len(namespaces(its)) == 4
        with Lab(2, 1000):  # the next one removes what a killed one has left
            assert namespaces(its) == []
        assert [namespaces(name) for name in others] == [[name] for name in others]
    finally:
        owner.kill()
        owner.communicate()
        for name in others:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def test_a_machine_that_does_not_let_it_is_told_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_NAMESPACES", tmp_path)
    if sys.platform == "linux":
        (tmp_path / "a file").touch()
        with pytest.raises(ValueError, match="^setns is refused here"):
            Host("a file", "10.77.0.1").enter()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="the command 'ip', of the package iproute2"), Lab(2, 1000):
        pass
