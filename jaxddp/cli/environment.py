"""What of a machine changes results: GPUs, driver, CUDA's libraries, variables, memory. No framework is imported."""

import os
import re
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from ..processes.job import visible_gpus

_SMI_TIMEOUT_S = 60.0  # a driver that starts the GPUs first takes seconds for each
_LIBRARY = re.compile(r"nvidia[-_](nccl|cudnn|cuda[-_]runtime)\b.*")
# Everything that NCCL, Gloo, XLA, CUDA, JAX and torch read, apart from where files are cached.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|XLA|JAX|CUDA|CUBLAS|CUDNN|NVIDIA_TF32|OMP)_\w+|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|"
    r"PYTORCH_(CUDA_)?ALLOC_CONF|LIBTPU_INIT_ARGS"
)
_CACHES = re.compile(r".*(CACHE|HOME|PATH|_DIR|VERSION)")


class Gpu(NamedTuple):
    """A GPU as the driver describes it."""

    number: int
    uuid: str
    name: str
    driver: str
    memory_bytes: int
    free_bytes: int


def gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of this host's; empty where nvidia-smi is missing, fails or hangs."""
    asked = "--query-gpu=index,uuid,name,driver_version,memory.total,memory.free", "--format=csv,noheader,nounits"
    try:
        done = subprocess.run(["nvidia-smi", *asked], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    found = []
    for number, uuid, name, driver, *mib in (row for line in lines if len(row := line.split(", ")) == len(Gpu._fields)):
        # "[N/A]" where the host's memory is the GPU's
        total, free = (int(one) * 2**20 if one.isdigit() else 0 for one in mib)
        found.append(Gpu(int(number), uuid, name, driver, total, free))
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return found
    visible = visible_gpus()  # numbers, or beginnings of a UUID
    return [gpu for gpu in found if str(gpu.number) in visible or any(gpu.uuid.startswith(name) for name in visible)]


def cuda_libraries() -> dict[str, str]:
    """Versions of NCCL, cuDNN and the CUDA runtime by the names of their installed wheels."""
    wheels = {(one.name or "").replace("_", "-"): one.version for one in distributions()}
    return {name: wheels[name] for name in sorted(wheels) if _LIBRARY.fullmatch(name)}


def variables() -> dict[str, str]:
    """The environment variables that change results or times."""
    found = sorted(name for name in os.environ if _VARIABLES.fullmatch(name) and not _CACHES.fullmatch(name))
    return {name: os.environ[name] for name in found}


def num_cores() -> int:
    """Cores that this process may use: SLURM and Open MPI leave a process some of the host's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes() -> int:
    """Free memory of this machine, or of the container that it runs in."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (told := Path("/proc/meminfo")).exists():
        found = re.search(r"^MemAvailable: +(\d+) kB", told.read_text(), re.MULTILINE)
        free = int(found[1]) * 1024 if found else free
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        held = int(limit.with_name("memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)", limit.with_name("memory.stat").read_text(), re.MULTILINE)
        free = min(free, int(most) - held + int(files[1] if files else 0))  # cached files can be evicted
    return free
