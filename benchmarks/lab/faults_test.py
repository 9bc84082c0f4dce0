"""The network to one of several hosts is cut: all processes leave, those that are left name the one that is not."""

import random
import subprocess
import time

import pytest

from benchmarks.lab.network import Lab
from jaxddp.watchdog import STATUS
from parity_tests.faults_test import (
    JAX,
    LEAVE_S,
    MOMENTS_S,
    NUM_FAULTS,
    NUM_PROCESSES,
    SILENT,
    TORCH,
    Job,
    check_others,
    report,
)


@pytest.mark.lab
@pytest.mark.full
@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
def test_a_link_that_is_cut_ends_the_job(tmp_path, framework):
    program, times = {"jaxddp": JAX, "torchref": TORCH}[framework], []
    for trial in range(NUM_FAULTS):
        rng, cut = random.Random(f"{framework} {trial}"), 1 + trial % (NUM_PROCESSES - 1)
        with Lab(NUM_PROCESSES, 1000) as lab, Job(tmp_path / str(trial), program, hosts=lab.hosts) as job:
            job.wait_until_all_met()
            time.sleep(rng.uniform(0, MOMENTS_S))
            bridge, since = lab.hosts[0].name.removesuffix("host0") + "bridge", time.monotonic()
            subprocess.run(["ip", "-n", bridge, "link", "set", f"port{cut}", "down"], check=True)
            times.append(check_others(job, cut, SILENT, since))
            job.wait(lambda job=job, cut=cut: job.processes[cut].poll() is not None, LEAVE_S, "the one cut off stays")
            assert job.processes[cut].returncode == STATUS
            assert f"jaxddp: process 0 {SILENT}" in job.said(cut)
    report(f"{framework}, a cut link", times)
