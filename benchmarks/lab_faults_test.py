"""The network to one of several hosts is cut, or slowed to a crawl: all processes leave, and name what is missing."""

import random
import re
import signal
import subprocess
import time

import pytest

from benchmarks.lab import Lab
from jaxddp.processes.watchdog import STATUS
from parity_tests import faults_test as faults
from parity_tests.faults_test import GONE, LEAVE_S, NUM_PROCESSES, SILENT, STUCK_S, Job

pytestmark = [pytest.mark.lab, pytest.mark.full, pytest.mark.parametrize("framework", ["jaxddp", "torchref"])]
PROGRAMS = {"jaxddp": faults.JAX, "torchref": faults.TORCH}


def test_a_link_that_is_cut_ends_the_job(tmp_path, framework):
    times = []
    for trial in range(faults.NUM_FAULTS):
        rng, cut = random.Random(f"{framework} {trial}"), 1 + trial % (NUM_PROCESSES - 1)
        with Lab(NUM_PROCESSES, 1000) as lab, Job(tmp_path / str(trial), PROGRAMS[framework], hosts=lab.hosts) as job:
            job.wait_until_all_met()
            time.sleep(rng.uniform(0, faults.MOMENTS_S))
            bridge, since = lab.hosts[0].name.removesuffix("host0") + "bridge", time.monotonic()
            subprocess.run(["ip", "-n", bridge, "link", "set", f"port{cut}", "down"], check=True)
            times.append(faults.check_others(job, cut, SILENT, since))
            job.wait(lambda job=job, cut=cut: job.processes[cut].poll() is not None, LEAVE_S, "the one cut off stays")
            assert job.processes[cut].returncode == STATUS
            assert f"jaxddp: process 0 {SILENT}" in job.said(cut)
    faults.report(f"{framework}, a cut link", times)


def test_a_link_that_crawls_ends_the_job(tmp_path, framework):
    """Beats may still arrive: then all wait in one step, or some are a step or a collective behind."""
    with Lab(NUM_PROCESSES, 1000) as lab, Job(tmp_path / "job", PROGRAMS[framework], hosts=lab.hosts) as job:
        job.wait_until_all_met()
        job.wait(lambda: "step 3" in job.said(0), 60, "no third step")
        bridge = lab.hosts[0].name.removesuffix("host0") + "bridge"
        crawl = ["root", "tbf", "rate", "4kbit", "burst", "2kb", "latency", "1s"]
        for namespace, interface in ((lab.hosts[1].name, "eth0"), (bridge, "port1")):
            subprocess.run(["tc", "-n", namespace, "qdisc", "change", "dev", interface, *crawl], check=True)
        job.wait(lambda: all(one.poll() is not None for one in job.processes), LEAVE_S + 2 * STUCK_S, "processes stay")
        for process in range(NUM_PROCESSES):
            said, status = job.said(process), job.processes[process].returncode
            # To the host that crawls, the end of process 0 may come before what it says, to the watchdog or to XLA.
            if process == 1 and faults.XLA_ABORTS in said:
                assert status in (STATUS, -signal.SIGABRT), said
                assert "Failed to send RPC to coordination service" in said, said
                continue
            assert status == STATUS, said
            behind = r"process \d(, \d)* did not begin (step \d+|collective \d+, after step \d+,)"
            slow = rf"(no process has finished step \d+|{behind}) within"
            found = rf"jaxddp: ({slow}|process \d {SILENT}|process 0 {GONE})"
            assert re.search(found, said), said
