"""Joins a process to its job: one JAX program over the devices of all its processes."""

import os
from typing import Any

import jax
from jax._src import distributed, xla_bridge
from jax.extend.backend import register_backend_factory
from jaxlib import _jax

from .. import __version__
from ..plugins import devices
from ..training.validation import count_examples
from .job import Job, find_job_or, keep_to_loopback, print_line, visible_gpus, waits
from .roll_call import address_here, meet
from .torchrun import with_free_port
from .watchdog import watch


def start_process(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float | None = None,
    stuck_s: float | None = None,
    preemption_service: bool = False,
) -> Job | None:
    """Joins this process to its job and starts JAX; call it before anything else uses JAX.

    Without arguments the job is that of torchrun, SLURM, Open MPI, or what JAX finds by itself (TPU pods, GKE), else
    one process. A process alone on its host uses all of its GPUs, else that of its local rank. When another is lost,
    this one prints a line and ends with status 5. Gives the job; None outside any, and where JAX found it.

    Args:
        coordinator_address: ``host:port`` of process 0, for a job described by hand.
        num_processes: Number of processes of the job.
        process_id: This process's number, from 0.
        timeout_s: Seconds to wait for the other processes; half of ``stuck_s``, 60 to 300, if None.
        stuck_s: Seconds that a process may be silent, or the others wait in a ``Trainer.step`` that it has not begun;
            that of ``launch --stuck-s``, else 600, if None.
        preemption_service: Whether JAX takes SIGTERM, for ``multihost_utils.reached_preemption_sync_point``.

    Raises a ValueError if the job contradicts itself, JAX has started, the coordinator's port is taken, or other
    processes do not come in time.
    """
    timeout_s, stuck_s = waits(timeout_s, stuck_s)
    job = find_job_or(coordinator_address, num_processes, process_id)
    if job is None:
        # JAX takes every Kubernetes pod for one of an indexed Job, and fails in others, such as a notebook's.
        kubernetes = None if "JOB_COMPLETION_INDEX" in os.environ else os.environ.pop("KUBERNETES_SERVICE_HOST", None)
        try:
            jax.distributed.initialize()
        except ValueError as error:
            if "coordinator_address" not in str(error):  # JAX's words for no job
                raise
        finally:
            if kubernetes is not None:
                os.environ["KUBERNETES_SERVICE_HOST"] = kubernetes
        return None
    local_devices = job.local_devices(len(visible_gpus()))
    if job.num_processes > 1:
        job = with_free_port(job, timeout_s)
        connections = meet(job, {"jaxddp": __version__, "jax": jax.__version__}, timeout_s)
        if xla_bridge.backends_are_initialized():
            raise ValueError("start_process must be called before anything else uses JAX, as a key or an array does")
        watch(job, connections, stuck_s)
        _use_gloo_at(address_here(job, connections))
        _join(job, local_devices, timeout_s, preemption_service)
    devices()  # in all processes: they exchange what they have
    if job.process_id == 0 and coordinator_address is None:
        local = jax.local_devices()
        kind = "CPU device" if local[0].platform == "cpu" else local[0].device_kind
        print_line(f"jaxddp: {job.describe(f'{len(local)} x {kind}')}")
    return job


def local_rows(batch: Any) -> Any:
    """Selects this process's rows ``[global batch / processes, ...]`` of a batch ``[global batch, ...]``."""
    index, count, num_examples = jax.process_index(), jax.process_count(), count_examples(batch)
    if num_examples % count:
        raise ValueError(f"batch (={num_examples} examples) must be divisible by the number of processes (={count})")
    size = num_examples // count
    return jax.tree.map(lambda leaf: leaf[index * size : (index + 1) * size], batch)


def _join(job: Job, local_devices: list[int], timeout_s: float, preemption_service: bool) -> None:
    keep_to_loopback(job)
    jax.config.update("jax_enable_preemption_service", preemption_service)
    if any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        # gRPC would ask the proxy for the coordinator, and abort the process.
        direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")
        os.environ["no_grpc_proxy"] = f"{direct},{job.host}" if direct else job.host
    jax.distributed.initialize(
        job.address,
        job.num_processes,
        job.process_id,
        local_devices or None,
        cluster_detection_method="deactivate",  # JAX would give a process alone on its host one GPU of it under SLURM
        initialization_timeout=max(1, round(timeout_s)),
        coordinator_bind_address=job._replace(host=job.bind_host).address if job.process_id == 0 else None,
    )


def _use_gloo_at(address: str | None) -> None:
    """Has JAX's CPUs communicate over Gloo, which listens at the address instead of that of the host's name."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if address is None:
        return

    def make_client() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=address)
        return xla_bridge.make_cpu_client(collectives=gloo)

    register_backend_factory("cpu", make_client, fail_quietly=False)
