"""Compile options that keep a plan from being rewritten, by platform.

By default XLA merges all gradient all-reduces of a step into one (CPU, TPU) or into buckets of its own (GPU, 30 MiB),
so every strategy would be the same program. Each backend has a pass that does it and a way to stop that pass for one
program; from jaxlib 0.10 to 0.12 they are the same. On CPU the optimization barriers, by which naive and flat wait for
the backward and equal buckets stay apart, are dropped before scheduling unless the pass that drops them is stopped too.
Then a third is, which makes one kernel of a small loop, and aborts the process if a barrier of the loss is in it.

    platform  pass that merges                                     stopped by
    CPU       cpu-all-reduce-combiner                              xla_disable_hlo_passes
    GPU       gpu-{all-reduce,all-gather,reduce-scatter}-combiner  a threshold of 0 bytes; all-reduces, by their keys
    TPU       all-reduce-combiner                                  xla_disable_hlo_passes

On TPUs every collective would be synchronous. The options let SparseCores carry them out, which v5p, v6e and v7x have
beside the cores that compute; chips without them compile as before. In zero3's loops two may be in flight at a time.

On GPUs the combiner itself makes a bucket's all-reduce, of the tensors with its key (``ddp.py``), and
all-reduce-contiguous, the pass that would copy them into one buffer and back, is stopped.

On GPUs a plan also has to survive the scheduler, which by default keeps one collective in flight and starts the next
when its model of the target's own links says so, whatever the network is. The options make it start each as soon as
its buffer is packed, with any number in flight: they queue on one stream, in the order of the plan. zero3 goes without
them, or the gathers of all units would start at once. In its loops over layers, each round gathers for the next one,
and scatters the gradients of the one before.

XLA has kernels of its own for small all-reduces in place of NCCL's, which no scheduler moves: they would all run after
the backward. jaxlib 0.12.0.1 cannot compile those of a few numbers over 64 H100.
"""

import re

import jaxlib.version

from ..arguments import check_kind
from ..strategy import Strategy

_DISABLE = "xla_disable_hlo_passes"
_ANY_BYTES = 2**40
_START_EARLY = {
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 65_536,  # more than any plan has buckets
}
_BY_NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}  # names kinds of collectives; older jaxlibs lack it
_OFFLOADED = ("all_reduce", "all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
_ON_SPARSE_CORES: dict[str, str | int | bool] = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True for kind in _OFFLOADED
}
_AHEAD_IN_LOOPS_ON_TPUS = {
    **{f"xla_tpu_enable_ici_{kind}_pipelining": True for kind in ("ag", "rs")},
    # Else a scatter starts when the gather for the next round is done, which is at the round's end.
    "xla_tpu_enable_concurrent_sparse_core_offloading": True,
}


def compile_options(strategy: Strategy, platform: str) -> dict[str, str | int | bool]:
    """Gives options that keep a strategy's plan, for ``jax.jit(f, compiler_options=...)`` or ``lowered.compile(...)``.

    On CPUs and TPUs, and of strategies that all-reduce, the list of disabled passes replaces that of ``XLA_FLAGS``. The
    platform is ``"cpu"``, ``"gpu"``, ``"cuda"`` or ``"tpu"``, as in ``mesh.devices.flat[0].platform``. Raises a
    ValueError if it is another, or the strategy is none.

    Example:
        >>> import jaxddp
        >>> jaxddp.compile_options(jaxddp.bucketed(25), "gpu")["xla_gpu_all_gather_combine_threshold_bytes"]
        0
    """
    check_kind("strategy", strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
    if platform == "cpu":
        return {_DISABLE: "cpu-all-reduce-combiner,cse_barrier_expander,small-while-loop-hoisting"}
    if platform in ("gpu", "cuda"):
        joins = strategy.plan(()).kind == "all-reduce" and not strategy.gathers_in_loss
        return {
            "xla_gpu_all_reduce_combine_threshold_bytes": _ANY_BYTES if joins else 0,
            "xla_gpu_all_gather_combine_threshold_bytes": 0,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
            **({_DISABLE: "all-reduce-contiguous"} if joins else {}),
            **(_ahead_in_loops() if strategy.gathers_in_loss else _START_EARLY),
            **(_BY_NCCL if _jaxlib() >= (0, 11, 1) else {}),
        }
    if platform == "tpu":
        ahead = _AHEAD_IN_LOOPS_ON_TPUS if strategy.gathers_in_loss else {}
        return _ON_SPARSE_CORES | ahead | {_DISABLE: "all-reduce-combiner"}
    raise ValueError(f"unknown platform {platform!r}: one of cpu, gpu, cuda, tpu")


def _ahead_in_loops() -> dict[str, str | bool]:
    """Lets each round of a loop start what the next one needs; the options have other names since jaxlib 0.11.1."""
    kinds = ("all_gather", "reduce_scatter")
    if _jaxlib() < (0, 11, 1):
        return {f"xla_gpu_enable_pipelined_{kind}": True for kind in kinds}
    return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in kinds}


def _jaxlib() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", jaxlib.version.__version__)[:3])
