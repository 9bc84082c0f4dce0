"""How a benchmark's ranks run, and the one way to start them; docs/benchmarks.md has the table of the kinds.

On CPUs a rank computes on one core, in either framework: XLA's CPU client starts a thread per core that its process may
use, so two ranks would otherwise look no faster than one. One more thread (``NPROC``) computes while the first waits;
torch's Gloo has its own.
"""

import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from jaxddp.cli.doctor import cuda_libraries, free_memory_bytes, gpus
from jaxddp.processes.job import Job, find_job
from jaxddp.training import allocator
from torchref.agreement import gather_texts
from torchref.launch import init_from_env, launch, report

from .lab import Host, open_lab

KINDS = ("simulated", "processes", "gpus", "lab", "job")
FRAMEWORKS = ("jaxddp", "torchref")
PROCESS_BYTES = 2**29  # a rank's process on CPUs, with both frameworks loaded
_COUNT_GPUS = "import jax; print(sum(device.platform == 'gpu' for device in jax.local_devices()))"
_COUNT_TIMEOUT_S = 120.0  # a driver may hang
# Without a report of any rank: a call of a slow network may take many minutes, a program or a round of GPUs does not.
_TIMEOUT_S, _GPU_TIMEOUT_S = 3600.0, 600.0
# torch needs room on the GPU beside JAX; XLA's collectives have streams of the highest priority, as torch's get here. A
# rank that hangs ends with what NCCL last said.
_ON_GPUS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCH_NCCL_HIGH_PRIORITY": "1", "NCCL_DEBUG": "WARN"}
_TWO_THREADS = {"NPROC": "2"}
# They would overrule the arithmetic that a benchmark sets.
_OVERRIDES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
_job: Job | None = None  # the one that this process has joined


@dataclass(frozen=True)
class Ranks:
    """So many ranks of a kind; plain data, sent to their processes."""

    num: int
    kind: str  # of ``KINDS``; in a job ``processes`` or ``gpus``
    hosts: tuple[Host, ...] = ()  # of a lab: rank r runs on the r-th
    is_job: bool = False  # whether the processes were started by srun, torchrun or mpirun

    def backend(self, framework: str) -> str:
        """What carries the collectives."""
        if framework == "torchref":
            return "NCCL" if self.kind == "gpus" else "Gloo"
        return {"simulated": "XLA in-process", "gpus": "XLA over NCCL"}.get(self.kind, "XLA over Gloo")

    def run(self, fn: Callable[..., Any], *args: Any, in_jax: bool, say: Callable[[str], None]) -> Any:
        """Runs ``fn(self, *args)`` on every rank, inside a process group; gives what the first one returns.

        Simulated ranks are one process, if it is ``in_jax``. A RankError if one raises, dies or is silent for too long.
        """
        if self.is_job:
            return fn(self, *args)
        on_gpus = self.kind == "gpus"
        environment = _ON_GPUS if on_gpus else allocator.ENVIRONMENT
        environment = environment | (_TWO_THREADS if self.kind in ("processes", "lab") else {})
        with mock.patch.dict(os.environ):
            _set_variables(environment)
            return launch(
                fn, self, *args, num_ranks=1 if self.kind == "simulated" and in_jax else self.num,
                backend="nccl" if on_gpus else "gloo",
                prepare=partial(_prepare, self, in_jax), timeout_s=_GPU_TIMEOUT_S if on_gpus else _TIMEOUT_S,
                on_message=lambda rank, said: say(said) if rank == 0 and isinstance(said, str) else None,
            )[0]  # fmt: skip


@functools.cache  # a process of a job joins JAX's once
def mesh_of(ranks: Ranks) -> Any:
    """Gives the mesh of ranks, on each of them."""
    import jax
    from jax.experimental import multihost_utils

    import jaxddp

    if ranks.kind == "simulated":
        jaxddp.simulate_devices(ranks.num)
        return jaxddp.data_mesh(ranks.num)
    host = _job.host if _job else ranks.hosts[0].address if ranks.hosts else "127.0.0.1"
    address = gather(_free_address(host) if dist.get_rank() == 0 else "")[0]
    if ranks.kind == "gpus":  # in torchrun's variables, from which JAX takes the GPU of its local rank
        local, num_local = (_job.local_process_id, _job.num_local_processes) if _job else (dist.get_rank(), ranks.num)
        names = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        place = *address.rsplit(":", 1), dist.get_rank(), ranks.num, local, num_local
        os.environ.update(zip(names, map(str, place), strict=True))
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        jaxddp.start_process()
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jaxddp.start_process(address, ranks.num, dist.get_rank())
    mesh = jaxddp.data_mesh()
    multihost_utils.sync_global_devices("connected")
    return mesh


def about(ranks: Ranks, framework: str) -> dict[str, Any]:
    """The fields of rows about the ranks of a framework; call it on a rank that has computed."""
    on_gpus = ranks.kind == "gpus"
    if framework == "jaxddp":
        device = mesh_of(ranks).devices.flat[0].device_kind
        versions = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    else:
        device = torch.cuda.get_device_name() if on_gpus else "cpu"
        versions = {"torch": torch.__version__}
    return {
        "framework": framework, "backend": ranks.backend(framework), "device": device, "num_ranks": ranks.num,
        "versions": versions | (cuda_libraries() if on_gpus else {}),
    }  # fmt: skip


def say_on_rank(text: str | None = None) -> None:
    """Says something from a rank, the first one's is printed; without text only that it is alive."""
    report(text)
    if _job is not None and text and dist.get_rank() == 0:
        print(text, flush=True)


def gather(value: Any) -> list[Any]:
    """Gathers a value that JSON knows, of every rank; every rank must call it."""
    return [json.loads(text) for text in gather_texts(json.dumps(value))]


def slowest(seconds: Sequence[float]) -> list[float]:
    """The times of the slowest rank, round by round; every rank must call it."""
    return [max(times) for times in zip(*gather(seconds), strict=True)]


def agree(said: str) -> str:
    """Gives the first text of any rank that is not empty; every rank must call it."""
    return next(filter(None, gather(said)), "")


def join_job() -> tuple[bool, dict[str, Any]]:
    """Joins this process to those of its job; tells whether it is the first, and the fields of rows about the job."""
    global _job
    _job = find_job()
    if _job is None:
        raise ValueError("on (=job) must be in a job: start a process for each rank with srun, torchrun or mpirun")
    is_on_gpus = bool(num_gpus())
    _set_variables(_ON_GPUS if is_on_gpus else _TWO_THREADS)
    torch.set_num_threads(1)
    init_from_env("nccl" if is_on_gpus else "gloo")
    return _job.process_id == 0, {"job_ranks": _job.num_processes, "launcher": _job.describe("1 x rank")}


def _set_variables(defaults: Mapping[str, str]) -> None:
    """Sets variables of ranks; what the user has set stays."""
    for name in _OVERRIDES:
        os.environ.pop(name, None)
    os.environ.update(defaults | os.environ)


def choose_ranks(num: int | None, kind: str | None, *, default: int, on_cpus: str = "processes") -> Ranks:
    """Decides how ranks run; raises ValueError if there are not so many GPUs or hosts.

    ``num`` None takes all GPUs, ``default`` on CPUs, a host each of a lab; ``kind`` None GPUs, or else ``on_cpus``.
    """
    if kind == "job":
        assert _job is not None, "the process has joined its job"
        if num not in (None, _job.num_processes):
            raise ValueError(f"ranks (={num}) must be left out in a job, whose ranks are its processes")
        return Ranks(_job.num_processes, "gpus" if dist.get_backend() == "nccl" else "processes", is_job=True)
    if kind == "lab":
        hosts = open_lab().hosts
        if num is not None and num > len(hosts):
            raise ValueError(f"ranks (={num}) must be at most the number of the lab's hosts (={len(hosts)})")
        return Ranks(num or len(hosts), kind, hosts[: num or len(hosts)])
    found = num_gpus() if kind in (None, "gpus") else 0
    if kind == "gpus" and not found:
        raise ValueError(f"on (=gpus) needs GPUs that both frameworks find: torch finds {torch.cuda.device_count()}")
    if found and num is not None and num > found:
        raise ValueError(f"ranks (={num}) must be at most the number of GPUs (={found})")
    return Ranks(num or found, "gpus") if found else Ranks(num or default, kind or on_cpus)


def free_bytes(kind: str) -> int:
    """Free memory: of the machine and its container, or of the fullest GPU, as the driver says.

    In a job, every rank must call it and gets the least: of a GPU, or of a rank's share of its host's memory.
    """
    if kind == "gpus" and not gpus():
        raise ValueError("nvidia-smi must be installed and work: it reports the free memory of GPUs")
    free = min(gpu.free_bytes for gpu in gpus()) if kind == "gpus" else free_memory_bytes()
    if _job is None:
        return free
    return min(gather(free if kind == "gpus" else free // _job.num_local_processes))  # alike: ranks decide by it


@functools.cache
def num_gpus() -> int:
    """How many GPUs both frameworks find; JAX in a process of its own, since this one must start no device."""
    if not (of_torch := torch.cuda.device_count()):
        return 0
    command, environment = [sys.executable, "-c", _COUNT_GPUS], os.environ | _ON_GPUS
    try:
        said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_COUNT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 0
    return min(of_torch, int((said.stdout.split() or ["0"])[-1])) if said.returncode == 0 else 0


def _prepare(ranks: Ranks, in_jax: bool, rank: int) -> None:
    """What comes first in a rank's process, before threads start: its host, its cores, and JAX."""
    if ranks.hosts:
        ranks.hosts[rank].enter()
    if ranks.kind != "gpus" and hasattr(os, "sched_setaffinity"):
        there = sorted(os.sched_getaffinity(0))
        count = min(ranks.num, len(there)) if ranks.kind == "simulated" and in_jax else 1
        first = rank * count % len(there)
        os.sched_setaffinity(0, (there + there)[first : first + count])
    from jaxddp.plugins import import_jax  # without what plugins print; torch's ranks take their weights from JAX

    import_jax()


def _free_address(host: str) -> str:
    with socket.create_server((host, 0)) as listener:
        return f"{host}:{listener.getsockname()[1]}"
