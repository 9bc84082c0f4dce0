"""The job that a process is part of, as the launcher that started it describes it.

| launcher | processes, this process, its place on the host                | coordinator                |
|----------|---------------------------------------------------------------|----------------------------|
| torchrun | WORLD_SIZE, RANK, LOCAL_RANK of LOCAL_WORLD_SIZE              | MASTER_ADDR, MASTER_PORT   |
| Open MPI | OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_RANK of _LOCAL_SIZE       | the host that runs mpirun  |
| SLURM    | SLURM_STEP_NUM_TASKS, _PROCID, _LOCALID, over _STEP_NUM_NODES | the first host of the step |

MASTER_ADDR and MASTER_PORT, where they are set, name the coordinator under Open MPI and SLURM too. The launcher closest
to the process wins, as torchrun under ``srun``.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

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

    def listen(self) -> socket.socket:
        """A socket that listens at process 0's address and the job's port; raises an OSError if it cannot."""
        family = socket.AF_INET6 if ":" in self.bind_host else socket.AF_INET
        return socket.create_server((self.bind_host, self.port), family=family, backlog=self.num_processes)

    def describe(self, devices: str) -> str:
        """One line about the job; ``devices`` are those of one process."""
        where = f"{self.num_hosts} host{'s' * (self.num_hosts > 1)}, {devices} a process, coordinator {self.address}"
        return f"{self.launcher}: {self.num_processes} processes on {where}"


def find_job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """Finds the job that environment variables describe; None if no launcher has set them, a ValueError if half set."""

    def number(name: str, default: int | None = None) -> int:
        text = environment.get(name, "" if default is None else str(default))
        if not text.isdecimal() or (int(text) == 0 and name.endswith(("SIZE", "TASKS", "NODES"))):
            raise ValueError(f"{name} (={text!r}) must be a number, as other variables of a job are set")
        return int(text)

    host, port = "", 0
    if "RANK" in environment or "WORLD_SIZE" in environment:
        launcher, num_processes, process_id = "torchrun", number("WORLD_SIZE"), number("RANK")
        # Set by hand under srun or mpirun, these lack the place on the host, which the launcher tells.
        local = number("LOCAL_RANK", number("SLURM_LOCALID", number("OMPI_COMM_WORLD_LOCAL_RANK", 0)))
        of_slurm = -(-num_processes // number("SLURM_STEP_NUM_NODES", num_processes))
        num_local = number("LOCAL_WORLD_SIZE", number("OMPI_COMM_WORLD_LOCAL_SIZE", max(of_slurm, local + 1)))
        num_hosts = number("GROUP_WORLD_SIZE", -(-num_processes // num_local))
        port = number("MASTER_PORT")
    elif "OMPI_COMM_WORLD_RANK" in environment:
        launcher, num_processes = "Open MPI", number("OMPI_COMM_WORLD_SIZE")
        process_id, local = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_LOCAL_RANK")
        num_local = number("OMPI_COMM_WORLD_LOCAL_SIZE")
        num_hosts = -(-num_processes // num_local)
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911; job numbers are multiples of 4096.
        uri = re.match(r"(\d+)\.\d+;tcp6?://\[?([^],]+?)[],:]", environment.get("OMPI_MCA_orte_hnp_uri", ""))
        host = uri[2] if uri else ""
        port = int(uri[1]) // 4096 if uri else os.getppid()  # mpirun is the parent of all on one host
    elif "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:  # a batch script has no step
        launcher, num_processes, process_id = "SLURM", number("SLURM_STEP_NUM_TASKS"), number("SLURM_PROCID")
        local, num_hosts = number("SLURM_LOCALID"), number("SLURM_STEP_NUM_NODES")
        num_local = max(-(-num_processes // num_hosts), local + 1)  # on the fullest host
        # node001 | node001,gpu7 | node[001-004,007],gpu7
        first = re.match(r"([^[,]+)(?:\[([^],-]+)[^]]*\]([^[,]*))?(?=,|$)", environment["SLURM_STEP_NODELIST"])
        host = "".join(filter(None, first.groups())) if first else ""
        port = number("SLURM_JOB_ID") * 16 + number("SLURM_STEP_ID")
    else:
        return None
    host = environment.get("MASTER_ADDR") or (_LOOPBACK if num_hosts == 1 and launcher != "torchrun" else host)
    if not host:
        raise ValueError("MASTER_ADDR must name the host of process 0: the launcher's variables do not")
    port = number("MASTER_PORT", _FIRST_PORT + port % _NUM_PORTS)
    owns_visible = launcher == "SLURM" and "SLURM_GPUS_PER_TASK" in environment
    token = environment.get(TOKEN, "")
    return Job(launcher, num_processes, process_id, num_local, local, num_hosts, host, port, owns_visible, token)


def find_job_or(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> Job | None:
    """The job given by hand, whose process may use every device of its host; else that of the environment."""
    if coordinator_address is num_processes is process_id is None:
        return find_job()
    host, _, port = str(coordinator_address).rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator_address (={coordinator_address!r}) must be host:port")
    number = check_integer("process_id", process_id, 0)
    if number >= (count := check_integer("num_processes", num_processes)):
        raise ValueError(f"process_id (={number}) must be at least 0 and below num_processes (={count})")
    return Job("address", count, number, 1, 0, count, host.strip("[]"), int(port))


def waits(timeout_s: float | None, stuck_s: float | None) -> tuple[float, float]:
    """How long to wait for processes to join, and for one that is stuck; for None as ``start_process`` says."""
    stuck_s = float(os.environ.get(STUCK_S, "600")) if stuck_s is None else stuck_s
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


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Prints a line to standard error in one write, which lines of other processes do not split as ``print``'s two."""
    stream = stream or sys.stderr
    stream.write(f"{line}\n")
    stream.flush()
