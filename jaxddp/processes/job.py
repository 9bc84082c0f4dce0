"""The job that a process is part of, as the launcher that started it describes it.

| launcher | processes, this process, its place on the host          | coordinator                  |
|----------|---------------------------------------------------------|------------------------------|
| torchrun | WORLD_SIZE, RANK, LOCAL_RANK of LOCAL_WORLD_SIZE        | MASTER_ADDR, MASTER_PORT     |
| Open MPI | OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_RANK of _LOCAL_SIZE | the host that runs mpirun    |
| SLURM    | SLURM_NTASKS, _PROCID, _LOCALID of _STEP_TASKS_PER_NODE | the first host of the step   |

MASTER_ADDR and MASTER_PORT, where they are set, name the coordinator under Open MPI and SLURM too. The launcher closest
to the process wins: torchrun may run under ``srun`` or ``mpirun``, and ``mpirun`` in a SLURM allocation.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..arguments import check_integer, check_positive

TOKEN = "JAXDDP_JOB_TOKEN"  # by which launch's processes know each other
STUCK_S = "JAXDDP_STUCK_S"  # of launch --stuck-s
_DEVICE_FILES = Path("/dev")
_LOOPBACK = "127.0.0.1"  # of a job on one host: nothing listens to other hosts
_FIRST_PORT, _NUM_PORTS = 61440, 4096  # above the ports that Linux gives to clients


class Job(NamedTuple):
    """A process's place among those that were started together."""

    launcher: str  # "torchrun", "Open MPI", "SLURM", or "address" if given by hand
    num_processes: int
    process_id: int
    num_local_processes: int  # on this host
    local_process_id: int
    num_hosts: int
    host: str  # of the coordinator, which process 0 runs
    port: int
    owns_visible: bool = False  # the launcher gave this process all accelerators that it sees
    token: str = ""  # that a process must know to join; "" if the launcher gives none

    def local_devices(self, num_visible: int) -> list[int]:
        """This process's accelerators of those that it sees: all, or one by local rank where processes share them."""
        if self.num_local_processes == 1 or num_visible <= 1 or self.owns_visible:
            return list(range(num_visible))
        if self.num_local_processes > num_visible:
            raise ValueError(
                f"num_local_processes (={self.num_local_processes}) must be at most the devices that this process sees "
                f"(={num_visible}), one for each: {self.launcher} started too many on this host"
            )
        return [self.local_process_id]

    @property
    def address(self) -> str:
        """``host:port`` of the coordinator."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def bind_host(self) -> str:
        """The address on which process 0 listens; raises an OSError if the coordinator's host has none here."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        address = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
        # Debian's /etc/hosts gives this for a host's own name, and no other host reaches it.
        return "0.0.0.0" if address == "127.0.1.1" else address

    def listen(self, port: int | None = None) -> socket.socket:
        """A socket that listens at process 0's address, at the job's port or another; raises OSError if it cannot."""
        address = self.bind_host, self.port if port is None else port
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family, backlog=self.num_processes)

    def describe(self, devices: str) -> str:
        """One line about the job; ``devices`` are those of one process."""
        where = f"{self.num_hosts} host{'s' * (self.num_hosts > 1)}, {devices} a process, coordinator {self.address}"
        return f"{self.launcher}: {self.num_processes} processes on {where}"


def find_job(environment: Mapping[str, str] | None = None) -> Job | None:
    """Finds the job that environment variables describe; None if no launcher has set them, a ValueError if half set."""
    found = os.environ if environment is None else environment
    if "RANK" in found or "WORLD_SIZE" in found:
        launcher, count, number = "torchrun", "WORLD_SIZE", "RANK"
        names = (number, count, "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if not found.get(name)]:
            there = ", ".join(name for name in names if name not in missing)
            raise ValueError(f"{', '.join(missing)} must be set, as {there} is: torchrun sets all of them")
    elif "OMPI_COMM_WORLD_RANK" in found:
        launcher, count, number = "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    elif "SLURM_STEP_NODELIST" in found and "SLURM_PROCID" in found:  # a batch script has no step
        launcher, count, number = "SLURM", "SLURM_NTASKS", "SLURM_PROCID"
    else:
        return None
    num_processes, process_id = _number(found, count), _number(found, number)
    local, num_local, owns_visible = _place_on_host(found, launcher)
    hosts = {"torchrun": "GROUP_WORLD_SIZE", "SLURM": "SLURM_STEP_NUM_NODES"}.get(launcher, "")
    num_hosts = _number(found, hosts, default=-(-num_processes // max(num_local, 1)))
    host, port = _coordinator(found, launcher, is_alone=num_hosts == 1)
    job = Job(launcher, num_processes, process_id, num_local, local, num_hosts, host, port, owns_visible)
    return _checked(job._replace(token=found.get(TOKEN, "")))


def find_job_or(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> Job | None:
    """The job given by hand, whose process may use every device of its host; else that of the environment."""
    if coordinator_address is num_processes is process_id is None:
        return find_job()
    if coordinator_address is None or num_processes is None or process_id is None:
        given = (coordinator_address, num_processes, process_id)
        raise ValueError(f"coordinator_address, num_processes and process_id (={given}) are given all or none")
    host, _, port = str(coordinator_address).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator_address (={coordinator_address!r}) must be host:port")
    check_integer("num_processes", num_processes)
    check_integer("process_id", process_id, 0)
    return _checked(Job("address", num_processes, process_id, 1, 0, num_processes, host.strip("[]"), int(port)))


def waits(timeout_s: float | None, stuck_s: float | None) -> tuple[float, float]:
    """How long to wait for processes to join, and for one that is stuck; for None as ``start_process`` says."""
    stuck_s = float(os.environ.get(STUCK_S, 600)) if stuck_s is None else stuck_s
    check_positive("stuck_s", stuck_s)
    timeout_s = min(300.0, max(60.0, stuck_s / 2)) if timeout_s is None else timeout_s
    check_positive("timeout_s", timeout_s)
    return min(timeout_s, 1e9), stuck_s  # a socket can wait no longer


def keep_to_loopback(job: Job) -> None:
    """Has NCCL and torch's Gloo listen on loopback alone in a job on one host, unless the user chose an interface."""
    if job.num_hosts == 1 and sys.platform == "linux":
        for library in ("NCCL", "GLOO"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def visible_gpus() -> list[str]:
    """Names the GPUs that this process sees, without starting CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        # access asks the cgroup too, where SLURM gives each task some; opening the file may start the GPU.
        files = _DEVICE_FILES.glob("nvidia[0-9]*")
        return [str(index) for index in range(sum(os.access(file, os.R_OK | os.W_OK) for file in files))]
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def _place_on_host(environment: Mapping[str, str], launcher: str) -> tuple[int, int, bool]:
    """This process's number among those of its host, how many they are, and whether what it sees is its own."""
    # Where torchrun's variables were set by hand, SLURM or Open MPI may know the place.
    if launcher == "torchrun" and "LOCAL_RANK" in environment:
        local = _number(environment, "LOCAL_RANK")
        return local, _number(environment, "LOCAL_WORLD_SIZE", default=local + 1), False
    if (ours := "OMPI_COMM_WORLD_LOCAL_RANK") in environment:
        return _number(environment, ours), _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"), False
    if "SLURM_LOCALID" not in environment:
        return 0, 1, False
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")  # of each node, such as 2(x3),1
    listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [int(count) for count, times in listed for _ in range(int(times or 1))]
    node = _number(environment, "SLURM_NODEID")
    if node >= len(counts):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE (={tasks!r}) must count the tasks of node {node}")
    return _number(environment, "SLURM_LOCALID"), counts[node], "SLURM_GPUS_PER_TASK" in environment


def _coordinator(environment: Mapping[str, str], launcher: str, is_alone: bool) -> tuple[str, int]:
    """The coordinator's host and port: those that the user chose, else the launcher's and one by the job's number."""
    host, number = _LOOPBACK if is_alone else "", 0
    if launcher == "Open MPI":
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911; job numbers are multiples of 4096.
        uri = re.match(r"(\d+)\.\d+;tcp6?://\[?([^],]+?)[],:]", environment.get("OMPI_MCA_orte_hnp_uri", ""))
        host = host or (uri[2] if uri else "")
        number = int(uri[1]) // 4096 if uri else os.getppid()  # mpirun is the parent of all on one host
    elif launcher == "SLURM":
        # node001 | node001,gpu7 | node[001-004,007],gpu7
        first = re.match(r"([^[,]+)(?:\[([^],-]+)[^]]*\]([^[,]*))?", environment["SLURM_STEP_NODELIST"])
        host = host or ("".join(filter(None, first.groups())) if first else "")
        number = _number(environment, "SLURM_JOB_ID") * 16 + _number(environment, "SLURM_STEP_ID")
    host = environment.get("MASTER_ADDR") or host
    if not host:
        raise ValueError("MASTER_ADDR must name the host of process 0: the launcher's variables do not")
    return host, _number(environment, "MASTER_PORT", default=_FIRST_PORT + number % _NUM_PORTS)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ValueError(f"{name} (={text!r}) must be a number in a job's environment")
    return int(text)


def _checked(job: Job) -> Job:
    for name, most in (("process_id", "num_processes"), ("local_process_id", "num_local_processes")):
        if not 0 <= (number := getattr(job, name)) < (count := getattr(job, most)):
            raise ValueError(f"{name} (={number}) must be at least 0 and below {most} (={count})")
    return job
