"""What a step should communicate, as compiled programs list it: its plan, and what the traced loss calls itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from ..strategy import Ranks, Strategy
from .buckets import Bucket, BucketPlan, bucket_width, dtype_bytes, tpu_width
from .collectives import kind_of
from .traces import CONSTANT, VARIES, ZERO, follow

# By JAX's primitives. A psum is that of shards along the replicas, or over Gloo what two ranks exchange.
_KINDS = dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce")  # the second is under check_vma
_KINDS |= {name.replace("-", "_"): name for name in ("all-gather", "reduce-scatter", "all-to-all")}
_KINDS["ppermute"] = "collective-permute"


class Planned(NamedTuple):
    """A planned collective."""

    kind: str  # as in a compiled program
    num_bytes: int  # of the full buffer on the wire
    axes: tuple[str, ...]  # the mesh axes along which ranks take part


def planned_along(
    strategy: Strategy, plan: BucketPlan, ranks: Ranks, platform: str, num_microbatches: int
) -> list[Planned]:
    """Lists what a plan communicates in one step, in launch order; ``strategy`` is the one that has made the plan."""
    if ranks.num_ranks == 1 or not strategy.sends:
        return []
    shards, replicas, num_shards = (ranks.shard_axis,), ranks.replica_axes, ranks.num_shards

    def exchanged(kind: str, bucket: Bucket) -> Planned:
        elements = num_shards * bucket_width(bucket, num_shards)
        return Planned(*planned_exchange(kind, elements, bucket.dtype, num_shards, platform), shards)

    reductions: list[Planned] = []
    for bucket in plan.buckets:
        if plan.kind == "all-reduce" and strategy.hook is not None:
            reductions += _of_hook(strategy.hook, bucket, ranks, platform)
        elif plan.kind == "all-reduce":
            num_bytes = wire_bytes(bucket.num_elements, bucket.dtype, platform)
            reductions.append(Planned("all-reduce", num_bytes, (*replicas, *shards)))
        else:
            reductions.append(exchanged("reduce-scatter", bucket))
            num_bytes = wire_bytes(bucket_width(bucket, num_shards), bucket.dtype, platform)
            reductions += [Planned("all-reduce", num_bytes, replicas)] * bool(replicas)
    gathers = [exchanged("all-gather", bucket) for bucket in plan.gathers]
    return reductions * (num_microbatches if plan.each_microbatch else 1) + gathers


def _of_hook(hook: Callable[..., Any], bucket: Bucket, ranks: Ranks, platform: str) -> list[Planned]:
    """What a hook communicates of a bucket, read off its trace."""
    sizes = [(axis, ranks.num_ranks // ranks.num_shards) for axis in ranks.replica_axes]
    sizes.append((ranks.shard_axis, ranks.num_shards))
    buffer = jax.ShapeDtypeStruct((bucket.num_elements,), jnp.dtype(bucket.dtype))
    program = jax.make_jaxpr(lambda buffer: hook(buffer, ranks.axis), axis_env=sizes)(buffer)
    return traced_collectives(program, platform, of_loss=True)[0]


def planned_exchange(kind: str, num_elements: int, dtype: Any, num_ranks: int, platform: str) -> tuple[str, int]:
    """What a reduce-scatter, an all-gather or an all-to-all of a full buffer compiles to: its kind and bytes."""
    compiled, width = kind_of(kind, num_ranks, platform), dtype_bytes(str(dtype))
    if platform == "tpu" and kind != "all-to-all":
        num_elements = num_ranks * tpu_width(num_elements // num_ranks)
    if compiled == "all-reduce":  # of what the other rank is to have
        return compiled, num_elements // num_ranks * width
    return compiled, wire_bytes(num_elements, dtype, platform) if kind == "reduce-scatter" else num_elements * width


def traced_collectives(
    program: core.ClosedJaxpr, platform: str, *, of_loss: bool = False
) -> tuple[list[Planned], list[Planned]]:
    """Lists the gathers and scatters of shards that a program's results depend on; those in a scan once per round.

    The first are those of every micro-batch, the second those of constants, which XLA takes out of that loop.
    ``of_loss``: instead those that the loss function calls itself, as BatchNorm does over an axis.
    """
    needed, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.out_avals))
    each: list[Planned] = []
    once: list[Planned] = []

    def add(equation: Any, operands: list[int], times: int, is_sync: bool) -> None:
        kind = _KINDS.get(equation.primitive.name)
        # A unit's unused parameters have a gradient of zeros, and XLA drops the scatter of nothing but zeros.
        if kind and is_sync != of_loss and min(operands, default=ZERO) != ZERO:
            full = (equation.outvars if kind == "all-gather" else equation.invars)[0].aval
            found = once if min(operands) == CONSTANT else each
            axes = equation.params.get("axes") or equation.params["axis_name"]
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            found += [Planned(kind, wire_bytes(full.size, full.dtype, platform), axes)] * times * bool(full.size)

    follow(core.ClosedJaxpr(needed, needed.constvars), [VARIES] * len(needed.invars), add)
    return each, once


def wire_bytes(num_elements: int, dtype: Any, platform: str) -> int:
    """Bytes of a buffer that is summed: XLA's collectives for CPUs convert bfloat16 to float32."""
    name = str(dtype)
    return num_elements * (4 if (platform, name) == ("cpu", "bfloat16") else dtype_bytes(name))
