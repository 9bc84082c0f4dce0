"""Processes on hosts of their own, started as docs/clusters.md says, train as one."""

import subprocess

import pytest

from benchmarks.lab.network import Lab
from parity_tests import job_test as jobs

SSH = """#!/bin/sh
# Runs a command on a host of the lab, whose name is its address: torchrun's agents tell each other their names.
exec ip netns exec {prefix}.$1 unshare --uts sh -c 'hostname 10.77.0.$((${{1#host}} + 1)); eval "$2"' sh "$1" "$2"
"""


@pytest.mark.lab
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["SSH", "two agents"])
@pytest.mark.parametrize("framework", ["jaxddp", "torchref"])
def test_hosts_train_as_one(framework, launcher, tmp_path):
    train = f"-m {framework} train --model=byte_shallow --steps=2 --batch-size=8 --strategy=zero1"
    with Lab(2, 1000) as lab:
        commands = jobs.block(launcher, lab.hosts[0].address).replace("script.py", train)
        environment = jobs.environment(tmp_path)
        (tmp_path / "programs" / "ssh").write_text(SSH.format(prefix=lab.hosts[0].name.removesuffix(".host0")))
        if launcher == "two agents":
            commands = "".join(f"ssh host{host} 'cd {tmp_path} && {commands.strip()}' &\n" for host in (0, 1)) + "wait"
        done = subprocess.run(
            ["bash", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
        )
    output = done.stdout + done.stderr
    assert (
        output.count(f"{framework}: torchrun: 2 processes on 2 hosts, 1 x CPU device a process, coordinator 10.77") == 1
    )
    assert output.count(": the same\n") == 1, output
    assert len([line for line in output.splitlines() if line.startswith("step ")]) == 2  # of process 0 alone
