"""What of a machine changes results: GPUs, driver, CUDA's libraries, variables, memory. No framework is imported."""

import ctypes
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from ..processes.job import visible_gpus

_SMI_TIMEOUT_S = 60.0  # a driver that starts the GPUs first takes seconds for each
_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")
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
    memory_bytes: int
    free_bytes: int


def facts() -> dict[str, Any]:
    """What every row of a benchmark records: driver, GPUs and variables, as far as there are any."""
    found = {"driver": driver_version(), "gpus": [gpu.name for gpu in gpus()], "variables": variables()}
    return {name: value for name, value in found.items() if value}


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None if there is none."""
    asked = "--query-gpu=driver_version", "--format=csv,noheader"
    text = _DRIVER.read_text() if _DRIVER.exists() else nvidia_smi(*asked)
    found = re.search(r"(?:Kernel Module\D*?(?:x86_64|aarch64)?\s+|^)(\d+\.\d[\d.]*)", text or "", re.MULTILINE)
    return found[1] if found else None


def gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of this host's; empty without NVIDIA's driver."""
    columns = "index,uuid,name,memory.total,memory.free"
    lines = (nvidia_smi(f"--query-gpu={columns}", "--format=csv,noheader,nounits") or "").splitlines()
    found = []
    rows = [row for line in lines if len(row := [cell.strip() for cell in line.split(",")]) == len(Gpu._fields)]
    for number, uuid, name, *mib in rows:
        # "[N/A]" where the host's memory is the GPU's
        total, free = (int(one) * 2**20 if one.isdigit() else 0 for one in mib)
        found.append(Gpu(int(number), uuid, name, total, free))
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return found
    visible = visible_gpus()  # numbers, or beginnings of a UUID
    return [gpu for gpu in found if str(gpu.number) in visible or any(gpu.uuid.startswith(name) for name in visible)]


def nvidia_smi(*arguments: str) -> str | None:
    """What ``nvidia-smi`` prints; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def cuda_libraries() -> dict[str, str]:
    """Versions of the NCCL, cuDNN and CUDA runtime that this process has loaded: frameworks load some at first use."""
    loaded = re.findall(r"(/\S+/lib(nccl|cudnn|cudart)\.so\S*)", _MAPS.read_text() if _MAPS.exists() else "")
    return {name: version for path, name in dict.fromkeys(loaded) if (version := _version(path, name))}


def _version(path: str, library: str) -> str | None:
    found = ctypes.c_int()
    try:
        loaded = ctypes.CDLL(path)
        if library == "cudnn":
            found.value = loaded.cudnnGetVersion()
        elif (loaded.ncclGetVersion if library == "nccl" else loaded.cudaRuntimeGetVersion)(ctypes.byref(found)):
            return None
    except (OSError, AttributeError):
        return None
    number = found.value * 10 if library == "cudart" else found.value  # 12080, of the others 22907
    return f"{number // 10000}.{number // 100 % 100}" + f".{number % 100}" * (library != "cudart")


def shared_libraries() -> dict[tuple[str, ...], str]:
    """Installed wheels that own one library file, which is then the last one's installed, and such a file."""
    owners: dict[str, set[str]] = defaultdict(set)
    for one in distributions():
        name = re.sub(r"[-_.]+", "-", one.name or "").lower()
        for file in one.files or () if name.startswith("nvidia-") else ():
            if ".so" in file.name:
                owners[str(file)].add(name)
    return {tuple(sorted(names)): file for file, names in sorted(owners.items()) if len(names) > 1}


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that change results or times."""
    found = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(found.items())
        if _VARIABLES.fullmatch(name) and not _CACHES.fullmatch(name)
    }


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
