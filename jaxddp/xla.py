"""Compile options that keep a plan from being rewritten, by platform.

By default XLA merges all gradient all-reduces of a step into one (CPU, TPU) or into buckets of its own (GPU, 30 MiB),
so every strategy would be the same program. Each backend has a pass that does it and a way to stop that pass for one
program; from jaxlib 0.10 to 0.12 they are the same. On CPU the optimization barriers, by which naive and flat wait for
the backward and equal buckets stay apart, are dropped before scheduling unless the pass that drops them is stopped too.

    platform  pass that merges                                     stopped by
    CPU       cpu-all-reduce-combiner                              xla_disable_hlo_passes
    GPU       gpu-{all-reduce,all-gather,reduce-scatter}-combiner  a threshold of 0 bytes
    TPU       all-reduce-combiner                                  xla_disable_hlo_passes
"""

from __future__ import annotations

import os
import re

from .strategy import Strategy

_DISABLE = "xla_disable_hlo_passes"


def compile_options(strategy: Strategy, platform: str) -> dict[str, str | int | bool]:
    """Says what keeps a strategy's plan, for ``jax.jit(f, compiler_options=...)`` or ``lowered.compile(...)``.

    Passes that ``XLA_FLAGS`` already disables stay disabled: a program's own list would replace that one.

    Args:
        strategy: The strategy to be compiled; at present all need the same.
        platform: ``"cpu"``, ``"gpu"``, ``"cuda"`` or ``"tpu"``, as in ``mesh.devices.flat[0].platform``.

    Returns:
        Option names and values.

    Raises:
        ValueError: If the platform is unknown.

    Example:
        >>> import jaxddp
        >>> jaxddp.compile_options(jaxddp.bucketed(25), "gpu")["xla_gpu_all_reduce_combine_threshold_bytes"]
        0
    """
    del strategy
    if platform == "cpu":
        passes = ["cpu-all-reduce-combiner", "cse_barrier_expander"]
        return {_DISABLE: _with_disabled_passes_of_environment(passes)}
    if platform in ("gpu", "cuda"):
        return {
            "xla_gpu_all_reduce_combine_threshold_bytes": 0,
            "xla_gpu_all_gather_combine_threshold_bytes": 0,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
        }
    if platform == "tpu":
        return {_DISABLE: _with_disabled_passes_of_environment(["all-reduce-combiner"])}
    raise ValueError(f"unknown platform {platform!r}: one of cpu, gpu, cuda, tpu")


def _with_disabled_passes_of_environment(passes: list[str]) -> str:
    already = re.findall(rf"--{_DISABLE}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return ",".join([*(already[-1].split(",") if already else []), *passes])
