"""Compile options that keep a plan from being rewritten, by platform.

By default XLA merges all gradient all-reduces of a step into one (CPU, TPU) or into buckets of its own (GPU, 30 MiB),
so every strategy would be the same program; ``docs/schedules.md`` has what each option does on GPUs.

    platform  pass that merges                                     stopped by
    CPU       cpu-all-reduce-combiner                              xla_disable_hlo_passes
    GPU       gpu-{all-reduce,all-gather,reduce-scatter}-combiner  a threshold of 0 bytes; all-reduces, by their keys
    TPU       all-reduce-combiner                                  xla_disable_hlo_passes
"""

import re

import jaxlib.version

from ..arguments import check_kind
from ..strategy import Strategy

_DISABLE = "xla_disable_hlo_passes"
# The second would drop the optimization barriers by which naive and flat wait for the backward and equal buckets stay
# apart. The third makes one kernel of a small loop, and aborts the process if a barrier is in it.
_CPU_PASSES = "cpu-all-reduce-combiner,cse_barrier_expander,small-while-loop-hoisting"
# By default one collective is in flight, and the next starts when XLA's model of the target's links says so. These make
# each start when its buffer is packed, in the order of the plan. Under zero3 all gathers would start at once.
_START_EARLY = {
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 65_536,  # more than any plan has buckets
}
# No scheduler moves XLA's own kernels for small all-reduces: they would all run after the backward.
_BY_NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}  # names kinds of collectives; older jaxlibs lack it
# Else collectives on TPUs are synchronous. v5p, v6e and v7x have SparseCores; other chips compile as before.
_ON_SPARSE_CORES: dict[str, str | int | bool] = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True
    for kind in ("all_reduce", "all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
}
# Each round of a loop starts what the next one needs; the options had other names before jaxlib 0.11.1.
_KINDS_IN_LOOPS = ("all_gather", "reduce_scatter")
_AHEAD_IN_LOOPS: dict[bool, dict[str, str | bool]] = {
    True: {f"xla_gpu_enable_pipelined_{kind}": True for kind in _KINDS_IN_LOOPS},
    False: {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _KINDS_IN_LOOPS},
}
_AHEAD_IN_LOOPS_ON_TPUS = {
    **{f"xla_tpu_enable_ici_{kind}_pipelining": True for kind in ("ag", "rs")},
    # Else a scatter starts when the gather for the next round is done, which is at the round's end.
    "xla_tpu_enable_concurrent_sparse_core_offloading": True,
}


def compile_options(strategy: Strategy, platform: str) -> dict[str, str | int | bool]:
    """Gives options that keep a strategy's plan, for ``jax.jit(f, compiler_options=...)`` or ``lowered.compile(...)``.

    A list of disabled passes in them replaces that of ``XLA_FLAGS``. The platform is ``"cpu"``, ``"gpu"``, ``"cuda"``
    or ``"tpu"``, as in ``mesh.devices.flat[0].platform``; a ValueError if it is another, or the strategy is none.
    """
    check_kind("strategy", strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
    if platform == "cpu":
        return {_DISABLE: _CPU_PASSES}
    if platform in ("gpu", "cuda"):
        # The combiner makes a bucket's all-reduce, of the tensors with its key (``ddp.py``); nothing is to copy them.
        joins = strategy.plan(()).kind == "all-reduce" and not strategy.gathers_in_loss
        is_old = tuple(map(int, re.findall(r"\d+", jaxlib.version.__version__)[:3])) < (0, 11, 1)
        return {
            "xla_gpu_all_reduce_combine_threshold_bytes": 2**40 if joins else 0,  # any bytes
            "xla_gpu_all_gather_combine_threshold_bytes": 0,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
            **({_DISABLE: "all-reduce-contiguous"} if joins else {}),
            **(_AHEAD_IN_LOOPS[is_old] if strategy.gathers_in_loss else _START_EARLY),
            **({} if is_old else _BY_NCCL),
        }
    if platform == "tpu":
        ahead = _AHEAD_IN_LOOPS_ON_TPUS if strategy.gathers_in_loss else {}
        return _ON_SPARSE_CORES | ahead | {_DISABLE: "all-reduce-combiner"}
    raise ValueError(f"unknown platform {platform!r}: one of cpu, gpu, cuda, tpu")
