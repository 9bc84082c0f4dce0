"""How a benchmark's ranks run, and the one way to start them, in both frameworks.

| kind        | jaxddp                                                     | torchref                            |
|-------------|------------------------------------------------------------|-------------------------------------|
| `simulated` | one process, a rank for each of its simulated CPU devices  | none: a rank of torch is a process  |
| `processes` | a process a rank, joined by `jax.distributed`, over Gloo   | a process a rank, over Gloo         |
| `gpus`      | one process, a rank for each of its GPUs, over NCCL        | a process a rank, over NCCL         |
| `lab`       | as `processes`, each on a host of its own: see `lab/`      | the same                            |
| `job`       | on hosts of a job, a process a GPU or CPU; then one a host | a process a rank, on the same hosts |

Where both frameworks find GPUs, ranks are GPUs, all of them, unless something else is asked for; on them products of
float32 are float32 in both (JAX would use TF32 by default, torch would not). On CPUs a rank of either framework has one
core (``cores.py``), torch's ranks compute with ``THREADS`` threads, and both frameworks keep freed memory, as programs
that train do (``jaxddp/training/allocator.py``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jaxddp.environment import cuda_libraries
from jaxddp.processes.job import visible_gpus
from jaxddp.training import allocator
from torchref.launch import HostShare, OnMessage, Prepare, launch

from ..lab.network import Host, open_lab
from ..training.arithmetic import OVERRIDES
from . import cores
from .exchange import gather
from .free_memory import PROCESS_BYTES, free_bytes
from .job_hosts import open_hosts

_T = TypeVar("_T")

KINDS = ("simulated", "processes", "gpus", "lab", "job")
_OF_PROCESSES = ("processes", "lab")
THREADS = 1
_COUNT_GPUS = "import jax; print(sum(device.platform == 'gpu' for device in jax.local_devices()))"
_COUNT_TIMEOUT_S = 120.0  # a driver that hangs has no GPUs
# Without a report of any rank: a call of a slow network may take many minutes, a program or a round of GPUs does not.
_TIMEOUT_S, _GPU_TIMEOUT_S = 3600.0, 600.0
# XLA's collectives have streams of the highest priority as well. A rank that hangs ends with what NCCL last said.
_NCCL = {"TORCH_NCCL_HIGH_PRIORITY": "1", "NCCL_DEBUG": "WARN"}


@dataclass(frozen=True)
class Ranks:
    """So many ranks of a kind; plain data, sent to the processes.

    Attributes:
        num: Their number.
        kind: One of ``KINDS``; in a job ``gpus`` or ``processes``.
        hosts: Of a lab: rank r runs on the r-th.
        per_host: Of a job: how many ranks each of its hosts has, those of the first host first.
        coordinator: Of a job: the first host's address.
        is_process_per_host: Of a job: whether one process of JAX has all ranks of a host.
    """

    num: int
    kind: str
    hosts: tuple[Host, ...] = ()
    per_host: tuple[int, ...] = ()
    coordinator: str = ""
    is_process_per_host: bool = False

    @property
    def backend(self) -> dict[str, str]:
        """What carries the collectives, by framework."""
        jax_s = {"simulated": "XLA in-process", "gpus": "XLA over NCCL"}.get(self.kind, "XLA over Gloo")
        jax_s += ", a process a host" if self.is_process_per_host else ""
        return {"jaxddp": jax_s, "torchref": "NCCL" if self.kind == "gpus" else "Gloo"}

    @property
    def in_words(self) -> str:
        """How many there are, and of how many GPUs."""
        if self.per_host:
            return f"{self.num} ranks, {self.num_on_host} on each of {len(self.per_host)} hosts"
        of_gpus, of_jax = _counted_gpus()
        counted = f"{self.num} rank{'s' if self.num > 1 else ''}"
        if self.kind == "gpus":
            return f"{counted} on {self.num} of {min(of_gpus, of_jax)} GPUs"
        return f"{counted} ({_without_jax(of_gpus)})" if self.kind == "simulated" and of_gpus > of_jax == 0 else counted

    def cuda_libraries(self) -> dict[str, str]:
        """Versions of the NCCL, cuDNN and CUDA that a rank has used; empty where ranks are no GPUs."""
        return cuda_libraries() if self.kind == "gpus" else {}

    def run_jax(self, fn: Callable[..., _T], *args: Any, on_message: OnMessage | None = None) -> list[_T]:
        """Runs ``fn(self, *args)`` in JAX's processes; inside, ``mesh()`` gives the mesh of these ranks.

        Returns one result for each process: of all ranks together, or of each.
        """
        return self._launch(True, fn, args, on_message)

    def run_torch(self, fn: Callable[..., _T], *args: Any, on_message: OnMessage | None = None) -> list[_T]:
        """Runs ``fn(self, *args)`` on every rank of a torch process group."""
        return self._launch(False, fn, args, on_message)

    def layouts(self) -> list[Ranks]:
        """These ranks, and if hosts of a job have several, again with a process of JAX for all ranks of a host."""
        return [self, *([replace(self, is_process_per_host=True)] if max(self.per_host, default=1) > 1 else [])]

    @property
    def num_on_host(self) -> int:
        """The most ranks that a host has."""
        return max(self.per_host, default=self.num)

    def processes(self, in_jax: bool) -> tuple[int, ...]:
        """The processes of a framework on each host."""
        if in_jax and self.is_process_per_host:
            return (1,) * len(self.per_host)
        if self.per_host:
            return self.per_host
        return (self.num if not in_jax or self.kind in _OF_PROCESSES else 1,)

    def mesh(self) -> Any:
        """Gives the mesh of these ranks; call it once, inside ``run_jax``, before JAX has started."""
        import jaxddp

        if self.kind == "gpus":
            import jax

            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs room on them as well
            jax.config.update("jax_default_matmul_precision", "highest")  # or it is TF32
        if self.kind in _OF_PROCESSES or self.per_host:
            import jax
            from jax.experimental import multihost_utils

            if self.kind != "gpus":
                jax.config.update("jax_platforms", "cpu")
                jax.config.update("jax_num_cpu_devices", self.per_host[0] if self.is_process_per_host else 1)
            host = self.coordinator or (self.hosts[0].address if self.hosts else "127.0.0.1")
            jaxddp.start_process(_agreed_address(host), sum(self.processes(True)), dist.get_rank())
            mesh = jaxddp.data_mesh()
            with _without_output():  # in its first collective XLA's Gloo prints who is connected
                multihost_utils.sync_global_devices("connected")
            return mesh
        if self.kind == "simulated":
            jaxddp.simulate_devices(self.num)
        return jaxddp.data_mesh(self.num)

    def _launch(
        self, in_jax: bool, fn: Callable[..., _T], args: tuple[Any, ...], on_message: OnMessage | None
    ) -> list[_T]:
        if self.per_host:
            return open_hosts().run(self, in_jax, fn, args, on_message)
        return self.launch_here(in_jax, fn, args, self.processes(in_jax)[0], None, on_message)

    def launch_here(
        self,
        in_jax: bool,
        fn: Callable[..., _T],
        args: Sequence[Any],
        num_processes: int,
        share: HostShare | None,
        on_message: OnMessage | None,
    ) -> list[_T]:
        """Runs ``fn(self, *args)`` in processes of this host, which are all of the call's or, of a job, a share."""
        first = share.first_rank if share else 0
        backend = "nccl" if self.kind == "gpus" and not in_jax else "gloo"
        prepare: Prepare = partial(_prepare, self, in_jax, first)
        environment = dict(_NCCL if self.kind == "gpus" else allocator.ENVIRONMENT)
        if in_jax and self.kind in _OF_PROCESSES:
            environment |= cores.environment(self.num_on_host if self.is_process_per_host else 1)
        with _with_environment(environment):
            return launch(
                fn, self, *args, num_ranks=num_processes, backend=backend, threads_per_rank=THREADS, prepare=prepare,
                timeout_s=_GPU_TIMEOUT_S if self.kind == "gpus" else _TIMEOUT_S, on_message=on_message, share=share,
            )  # fmt: skip


def chosen_ranks(num_ranks: int | None, default: int, kind: str | None = None, *, batch_size: int = 0) -> Ranks:
    """Decides how the ranks run that were asked for, or else ``default`` ranks or as many GPUs as can share the batch.

    ``kind`` is as for ``ranks_of_machine``; ``batch_size`` is that of the global batch, 0 if anything will do.

    Raises:
        ValueError: As ``ranks_of_machine``, and if there are not as many GPUs as were asked for.
    """
    if kind == "job":
        num_hosts, num_gpus_each = open_hosts().num_hosts, open_hosts().num_gpus
        default = num_hosts * max(1, default // num_hosts)
        if num_gpus_each:
            shared = [num_hosts * each for each in range(num_gpus_each, 0, -1) if batch_size % (num_hosts * each) == 0]
            default = next(iter(shared), num_hosts)
        return ranks_of_machine(num_ranks or default, kind)
    ranks = ranks_of_machine(num_ranks or default, kind)
    if ranks.kind != "gpus":
        return ranks
    if num_ranks is None:
        return next(Ranks(num, "gpus") for num in range(num_gpus(), 0, -1) if batch_size % num == 0)
    if ranks.num < num_ranks:
        raise ValueError(f"ranks (={num_ranks}) must be at most the number of GPUs (={ranks.num})")
    return ranks


def ranks_of_machine(num_ranks: int, kind: str | None = None) -> Ranks:
    """Decides how ranks run here.

    Args:
        num_ranks: How many are wanted; with GPUs there are no more than those that CUDA_VISIBLE_DEVICES leaves.
        kind: One of ``KINDS``; None takes GPUs where there are any, and simulated devices elsewhere; ``"lab"`` and
            ``"job"`` take the hosts of the lab or job that is open.

    Raises:
        ValueError: If the kind is unknown, there are no GPUs or not as many hosts for it, a number is not positive, or
            so many processes would not fit into memory.
    """
    if num_ranks < 1:
        raise ValueError(f"ranks (={num_ranks}) must be a positive integer")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"unknown kind of ranks {kind!r}: one of {', '.join(KINDS)}")
    if kind == "lab":
        hosts = open_lab().hosts
        if num_ranks > len(hosts):
            raise ValueError(f"ranks (={num_ranks}) must be at most the number of the lab's hosts (={len(hosts)})")
        return Ranks(num_ranks, kind, hosts[:num_ranks])
    if kind == "job":
        return _ranks_of_job(num_ranks)
    if kind == "gpus" and not num_gpus():
        of_torch, _ = _counted_gpus()
        raise ValueError(
            f"ranks of kind 'gpus' need GPUs, and {_without_jax(of_torch) if of_torch else 'torch finds none'}"
        )
    if kind is None:
        kind = "gpus" if num_gpus() else "simulated"
    if kind == "gpus":
        return Ranks(min(num_ranks, num_gpus()), kind)
    _check_room(num_ranks)  # torch's are processes even where JAX's are simulated
    return Ranks(num_ranks, kind)


def _ranks_of_job(num_ranks: int) -> Ranks:
    """Spreads ranks evenly over the hosts of the job, or gives one to each of the first hosts."""
    hosts = open_hosts()
    if num_ranks > hosts.num_hosts and num_ranks % hosts.num_hosts:
        raise ValueError(
            f"ranks (={num_ranks}) must be divisible by the number of the job's hosts (={hosts.num_hosts})"
        )
    each = max(1, num_ranks // hosts.num_hosts)
    if hosts.num_gpus and each > hosts.num_gpus:
        most = hosts.num_hosts * hosts.num_gpus
        raise ValueError(f"ranks (={num_ranks}) must be at most the number of the job's GPUs (={most})")
    if not hosts.num_gpus:
        _check_room(each)
    per_host = (each,) * min(num_ranks, hosts.num_hosts)
    return Ranks(num_ranks, "gpus" if hosts.num_gpus else "processes", (), per_host, hosts.job.host)


def _check_room(num_ranks: int) -> None:
    if (most := free_bytes("processes") // PROCESS_BYTES) < num_ranks:
        each, free = PROCESS_BYTES / 2**30, free_bytes("processes") / 2**30
        raise ValueError(
            f"ranks (={num_ranks}) must be at most {most}: each takes {each:g} GiB for its process, {free:.1f} are free"
        )


def num_gpus() -> int:
    """How many GPUs there are for both frameworks."""
    return min(_counted_gpus())


def _counted_gpus() -> tuple[int, int]:
    """GPUs that torch finds, which it does without starting any, and that JAX finds, which is only asked then."""
    of_torch = torch.cuda.device_count()
    return of_torch, count_jax_gpus() if of_torch else 0


@functools.cache
def count_jax_gpus() -> int:
    """GPUs that JAX finds, in a process of its own: this one must not start a device before its ranks do."""
    command = [sys.executable, "-c", _COUNT_GPUS]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 0
    last = said.stdout.split()[-1:]
    return int(last[0]) if said.returncode == 0 and last else 0


def _without_jax(of_torch: int) -> str:
    return f"torch finds {of_torch}, JAX none: it takes .[cuda12] or .[cuda13]"


@contextlib.contextmanager
def _with_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Gives variables to the processes that are started meanwhile, and keeps ``OVERRIDES`` from them.

    What the user has set of the others stays.
    """
    before = dict(os.environ)
    new = {name: value for name, value in variables.items() if name not in before}
    os.environ.update(new)
    for name in OVERRIDES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in OVERRIDES if name in before})


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Drops what is printed meanwhile, by native code too; errors stay."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _prepare(ranks: Ranks, in_jax: bool, first: int, local_rank: int) -> None:
    """What comes first in a rank's process: its host, its cores or its GPU, and JAX."""
    rank = first + local_rank
    if ranks.hosts:
        ranks.hosts[rank].enter()
    if in_jax and ranks.is_process_per_host:
        cores.keep_to_cores("simulated" if ranks.kind == "processes" else ranks.kind, ranks.num_on_host, rank)
    else:
        kind = "processes" if ranks.kind == "simulated" and not in_jax else ranks.kind
        cores.keep_to_cores(kind, ranks.num, rank)
    if in_jax:
        if ranks.per_host and ranks.kind == "gpus":  # JAX would take all of the host
            own = list(range(ranks.num_on_host)) if ranks.is_process_per_host else [local_rank]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(own))
        prepare_jax(rank)


def prepare_jax(rank: int) -> None:
    """Imports JAX in a rank's process, before its function does, without what plugins print."""
    from jaxddp.cli.quiet import import_jax

    import_jax()


def _agreed_address(host: str) -> str:
    """A free port of rank 0's host, which all ranks of the process group get to know."""
    port = 0
    if dist.get_rank() == 0:
        with socket.socket() as listener:
            listener.bind((host, 0))
            port = listener.getsockname()[1]
    return f"{host}:{gather(port)[0]}"
