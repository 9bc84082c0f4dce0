"""``python -m jaxddp doctor``: what of this machine changes results; each framework is asked in a process that ends."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..plugins import cuda_plugins
from ..processes.job import find_job, visible_gpus

OK, NOTE, FAIL = "ok", "note", "FAIL"
_TIMEOUT_S = 180.0
_GIB = 2**30
_DRIVER = Path("/proc/driver/nvidia/version")
_ASK = {
    "JAX": """
from jaxddp.plugins import devices, import_jax
import_jax()
import jax
print(f"{jax.__version__} on {len(devices())} x {devices()[0].device_kind}")
""",
    "torch": """
import torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(f"{torch.__version__} on {count or 1} x {torch.cuda.get_device_name(0) if count else 'cpu'}")
""",
}
_OVERRIDES = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "torch multiplies float32 in TF32 whatever a program asks for: unset it",
    "NVIDIA_TF32_OVERRIDE": "it replaces what programs ask for in both frameworks: unset it",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for and nothing overlaps: unset it",
    "CUDA_DEVICE_MAX_CONNECTIONS=1": "communication starts only after the computation queued before it: unset it",
    "NCCL_P2P_DISABLE": "GPUs of a host do not use NVLink",
    "NCCL_IB_DISABLE": "hosts communicate over TCP",
}
_SMI_TIMEOUT_S = 60.0  # a driver that starts the GPUs first takes seconds for each
_LIBRARY = re.compile(r"nvidia[-_](nccl|cudnn|cuda[-_]runtime)\b.*")
# Everything that NCCL, Gloo, XLA, CUDA, JAX and torch read, apart from where files are cached.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|XLA|JAX|CUDA|CUBLAS|CUDNN|NVIDIA_TF32|OMP)_\w+|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|"
    r"PYTORCH_(CUDA_)?ALLOC_CONF|LIBTPU_INIT_ARGS"
)
_CACHES = re.compile(r".*(CACHE|HOME|PATH|_DIR|VERSION)")


def add_parser(commands: Any) -> None:
    """Adds the command ``doctor`` to argparse's subparsers."""
    parser = commands.add_parser(
        "doctor",
        help="report what this machine has for training, and what will not work",
        description="Report devices, drivers, libraries, launcher, memory and variables, as both frameworks "
        "see them: each line is ok, a note, or FAIL with what to do. The exit status is 1 if something will not work.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list instead")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 1 if something will not work, else 0."""
    lines = list(examine())
    shown = "\n".join(f"{status:4}  {subject:10}  {found}" for status, subject, found in lines)
    print(json.dumps(lines) if arguments.json else shown)
    return int(any(line[0] == FAIL for line in lines))


def examine() -> Iterator[tuple[str, str, str]]:
    """Gives lines: status, subject, and what was found, with what to do unless it is ok."""
    cores = f"{num_cores()} of {os.cpu_count()} cores for this process"
    yield OK, "jaxddp", f"{__version__}, Python {sys.version.split()[0]}, {cores}"
    found = gpus()
    if not found and _DRIVER.exists():
        hidden = " that CUDA_VISIBLE_DEVICES leaves" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        yield FAIL, "GPUs", f"none{hidden}: nvidia-smi must list them: is it installed, and does it run?"
    for (name, driver), count in Counter((gpu.name, gpu.driver) for gpu in found).items():
        yield OK, "GPUs", f"{count} x {name}, driver {driver}"
    for framework in _ASK:
        status, said = ask(framework)
        if "No module named 'torch'" in said:
            yield NOTE, framework, "not installed: torchref needs it: install .[torch]"
        elif status:
            yield FAIL, framework, f"{said}: {framework} must start here: reinstall it, or end what holds the GPUs"
        elif said.endswith(" x cpu") and found and os.environ.get("JAX_PLATFORMS") != "cpu":
            install = "install .[cuda12] or, with a driver from 580 on, .[cuda13]"
            yield FAIL, framework, f"{said}: it finds none of {len(found)} GPUs: {install}"
        else:
            yield OK, framework, said
    libraries = cuda_libraries()
    yield OK, "libraries", ", ".join(map(" ".join, libraries.items())) or "no wheels of CUDA"
    for library in ("nccl", "cudnn"):  # one file, which is then of the wheel that was installed last
        if len(owners := [name for name in libraries if library in name]) > 1:
            yield FAIL, "libraries", f"{' and '.join(owners)} own one file: install .[cuda12] or .[cuda13] anew"
    if len(plugins := cuda_plugins()) > 1:
        advice = "which one JAX starts is chance: beside .[cuda13] install test-gpu in place of test and targets"
        yield FAIL, "libraries", f"{' and '.join(plugins)}: {advice}"
    try:
        job = find_job()
        chosen = job and job.local_devices(len(visible_gpus()))
        yield OK, "job", job.describe(f"GPUs {chosen}" if chosen else "no GPU") if job else "none, one process"
    except ValueError as error:
        yield FAIL, "job", f"the launcher's variables contradict each other: {error}"
    yield OK, "memory", f"{free_memory_bytes() / _GIB:.1f} GiB of the host free"
    if len(found) > 1 and (free_bytes := shutil.disk_usage("/dev/shm").free) < _GIB:
        advice = "NCCL's processes share memory there: give the container --shm-size=1g or more"
        yield NOTE, "memory", f"{free_bytes / _GIB:.1f} GiB of /dev/shm free: {advice}"
    for gpu in found:
        if gpu.free_bytes < 0.9 * gpu.memory_bytes:
            free = f"{gpu.free_bytes / _GIB:.1f} of {gpu.memory_bytes / _GIB:.1f} GiB of GPU {gpu.number} free"
            yield NOTE, "memory", f"{free}: other processes hold the rest: nvidia-smi names them"
    for name, value in variables().items():
        advice = _OVERRIDES.get(name) or _OVERRIDES.get(f"{name}={value}", "")
        yield (NOTE, "variable", f"{name}={value}: {advice}") if advice else (OK, "variable", f"{name}={value}")


def ask(framework: str) -> tuple[int, str]:
    """The exit status of a process that starts a framework, and the last line that it prints."""
    counts_only = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # others may use the GPUs meanwhile
    command = [sys.executable, "-c", _ASK[framework]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=counts_only)
    except subprocess.TimeoutExpired:
        return 1, f"gives no answer within {_TIMEOUT_S:.0f} s"
    said = done.stderr if done.returncode else done.stdout
    return done.returncode, (said.strip() or f"exit status {done.returncode}").splitlines()[-1]


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
