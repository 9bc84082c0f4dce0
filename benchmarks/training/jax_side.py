"""Every variant of a setup in JAX: one process with a rank for each of its devices, or a process for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import torch.distributed as dist
from jax.sharding import Mesh

import jaxddp
from jaxddp.checkpoint.interop import to_numpy, torch_names
from jaxddp.communication.backward_order import matmul_flops
from jaxddp.communication.planned import trace_gradients
from jaxddp.mesh import DATA_AXIS
from jaxddp.models import abstract, build
from jaxddp.strategy import without_communication
from jaxddp.tree import named_leaves
from torchref.launch import report

from ..harness.ranks import Ranks
from ..harness.turns import join
from .arithmetic import set_in_jax
from .device_time import by_profiler
from .interleaving import Attempts, agree_over_ranks
from .jax_variants import Jit, Planned, in_float32, place, probes, rows_of_process
from .measure import SideResult, StrategySpec, TrainingSetup
from .rounds import time_rounds


def run(ranks: Ranks, setup: TrainingSetup) -> SideResult:
    """Trains under every strategy; runs in processes of its own, before JAX has started there."""
    with join(setup.turns, "jaxddp", lambda: report(("waits",))) as wait_for_turn:
        return _train(ranks, setup, wait_for_turn)


def _train(ranks: Ranks, setup: TrainingSetup, wait_for_turn: Callable[[], None]) -> SideResult:
    mesh = ranks.mesh()
    loss_fn, params = build(setup.model, seed=setup.seed)
    optimizer = optax.adamw(setup.learning_rate, weight_decay=0.01)
    params = set_in_jax(setup.dtype, setup.ranks.kind, params)
    rows = [place(rows_of_process(batch), mesh) for batch in setup.batches]  # before the clock starts

    attempt = Attempts(agree_over_ranks)
    names = dict(zip(named_leaves(params), torch_names(params), strict=True))
    wanted: dict[str, tuple[StrategySpec, bool]] = {}  # and whether it communicates
    for spec in setup.of("jaxddp"):
        wanted.setdefault(spec.label, (spec, True))
        if setup.with_baselines:
            label, silent = spec.without_communication
            wanted.setdefault(label, (silent, False))

    def make(spec: StrategySpec, sends: bool) -> Planned | Jit:
        if spec.name == "jit":
            return Jit(loss_fn, optimizer, mesh, params, rows)
        return Planned(jaxddp.Trainer(loss_fn, optimizer, _strategy(spec, sends), mesh), params, rows)

    # States are made one after the other, because that runs programs; several programs compile at a time, since
    # nothing is measured yet. Several processes compile in the same order, one program at a time.
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(num_threads if jax.process_count() == 1 else 1) as pool:
        compiling = {}
        for label, (spec, sends) in wanted.items():
            if (one := attempt(label, partial(make, spec, sends))) is not None:
                compiling[label] = pool.submit(
                    one.compile, setup.batches[0], names if sends else None, setup.with_schedules
                )
        report(("doing", f"compiling {len(compiling)} programs, and single-process training"))
        # Not data_mesh(1), whose device may be another process's.
        alone = Mesh(np.array(jax.local_devices()[:1]), (DATA_AXIS,))
        reference = Planned(jaxddp.Trainer(loss_fn, optimizer, jaxddp.naive(), alone), params, setup.batches)
        expected = [reference.step(index) for index in range(len(setup.batches))]
        trained = reference.weights()
        del reference
        for label, pending in compiling.items():
            attempt(label, pending.result)
            report(("compiled", label))  # a sign of life
    timed = probes(setup, loss_fn, params, mesh, rows) if setup.probe_bytes else []

    return time_rounds(
        "jaxddp", ranks, setup, attempt, timed, expected, trained,
        time_step=partial(by_profiler, barrier=dist.barrier),
        wait_for_turn=wait_for_turn,
        wait=jax.block_until_ready,
        device=mesh.devices.flat[0].device_kind,
        versions={name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax", "optax")}
        | ranks.cuda_libraries(),
        weights=in_float32(params) if dist.get_rank() == 0 else {},
    )  # fmt: skip


def initial_weights(ranks: Ranks, setup: TrainingSetup) -> dict[str, np.ndarray]:
    """Makes the weights from which every run of a setup starts, by torch name."""
    ranks.mesh()
    return to_numpy(build(setup.model, seed=setup.seed)[1])


def gradient_shares(setup: TrainingSetup) -> tuple[float, dict[str, float], int]:
    """Traces a rank's step on shapes alone, which starts no device, and says how FLOPs are spread over it.

    Returns:
        The forward's share of the FLOPs of forward and backward; the share that is done before each gradient is ready,
        by torch name; and the bytes of all gradients.
    """
    loss_fn, params = abstract(setup.model)
    names = dict(zip(named_leaves(params), torch_names(params), strict=True))
    size = setup.global_batch // setup.ranks.num
    batch = {name: array[:size] for name, array in setup.batches[0].items()}

    def flops(function: Callable[..., Any]) -> float:
        return sum(matmul_flops(equation) for equation in jax.make_jaxpr(function)(params, batch).eqns)

    trace = trace_gradients(jax.grad(loss_fn), params, batch)
    ready = {names[one.name]: share for one, share in zip(trace.tensors, trace.flops_before, strict=True)}
    num_bytes = sum(tensor.num_bytes for tensor in trace.tensors)
    return flops(loss_fn) / flops(jax.grad(loss_fn)), ready, num_bytes


def _strategy(spec: StrategySpec, sends: bool) -> jaxddp.Strategy:
    options: dict[str, Any] = {} if spec.bucket_mb is None else {"bucket_mb": spec.bucket_mb}
    strategy = jaxddp.make_strategy(spec.name, **options)
    return strategy if sends else without_communication(strategy)
