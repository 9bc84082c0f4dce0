"""The collectives in each framework: a call of each that is ready to be timed, and what it should communicate.

In JAX each is a program of its own, compiled for the mesh and read back, with results in new buffers; torch's
all_reduce and broadcast work in place, on a fresh input before every call.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import collective_cases as cases
from .ranks import Ranks, mesh_of

# XLA has no broadcast and no reduce for every backend: jaxddp's are all-reduces.
_OF_JAX = {"broadcast": "all-reduce", "reduce": "all-reduce", "send_recv": "collective-permute"}
# Over Gloo, XLA's are wrong or slow, and others take their place: jaxddp/communication/collectives.py.
REPLACED = ("reduce_scatter", "all_gather")
_IN_PLACE = ("all_reduce", "broadcast")


class Call(NamedTuple):
    """A collective of one size; ``prepare`` makes its input, ``run`` returns when its result is there."""

    size_bytes: int
    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    num_wrong: Callable[[Any], int]
    planned: list[tuple[str, int]] | None
    found: list[tuple[str, int]]
    kernel: str | None = None


def jax_call(ranks: Ranks, name: str, asked_bytes: int) -> Call:
    """Compiles a collective of jaxddp for a size."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxddp
    from jaxddp.communication import collectives, ring
    from jaxddp.mesh import DATA_AXIS

    mesh, num_ranks, spec = mesh_of(ranks), ranks.num, PartitionSpec(DATA_AXIS)
    size_bytes, options = cases.size_of(name, asked_bytes, num_ranks), cases.options_of(name, num_ranks)
    length, elements = cases.brought_length(name, asked_bytes, num_ranks), size_bytes // cases.ELEMENT_BYTES
    collective = getattr(ring if name in cases.RINGS else collectives, name)
    mapped = jax.shard_map(
        lambda x: collective(x, DATA_AXIS, **options), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )

    def start(index: Any) -> int:
        return index[0].start or 0

    given = jax.make_array_from_callback(
        (num_ranks * length,), NamedSharding(mesh, spec), lambda index: cases.values(start(index) // length, length)
    )

    def wrong(result: Any) -> int:
        return sum(
            cases.num_wrong(
                np.asarray(one.data), cases.expected(name, start(one.index) // one.data.size, num_ranks, elements)
            )
            for one in result.addressable_shards
        )

    program = jax.jit(mapped).lower(given).compile()
    found = jaxddp.read_schedule(program).collectives()
    kernels = ", ".join(sorted({*re.findall(r"KERNEL_STRATEGY_(\w+)", program.as_text() or "")}))
    is_replaced = name in REPLACED and ranks.backend("jaxddp") == "XLA over Gloo"
    return Call(
        size_bytes, lambda: given, lambda x: jax.block_until_ready(program(x)), wrong,
        None if is_replaced else cases.plan(name, _OF_JAX, size_bytes, num_ranks),
        [(one.kind, one.num_bytes) for one in found], kernels or None,
    )  # fmt: skip


def torch_call(ranks: Ranks, name: str, asked_bytes: int) -> Call:
    """Makes the input of a collective of torchref of a size."""
    import torch
    import torch.distributed as dist

    from torchref.communication import collectives, ring

    on_gpu, num_ranks, rank = ranks.kind == "gpus", ranks.num, dist.get_rank()
    size_bytes, options = cases.size_of(name, asked_bytes, num_ranks), cases.options_of(name, num_ranks)
    collective = getattr(ring if name in cases.RINGS else collectives, name)
    given = torch.from_numpy(cases.values(rank, cases.brought_length(name, asked_bytes, num_ranks)))
    given = given.cuda() if on_gpu else given
    overwritten = torch.empty_like(given) if name in _IN_PLACE else given

    def wrong(result: Any) -> int:
        return cases.num_wrong(
            result.cpu().numpy(), cases.expected(name, rank, num_ranks, size_bytes // cases.ELEMENT_BYTES)
        )

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def prepare() -> Any:
        if name in _IN_PLACE:
            overwritten.copy_(given)
            wait()
        return overwritten

    def call(x: Any) -> Any:
        result = collective(x, **options)
        wait()
        return x if name in _IN_PLACE else result

    with collectives.record() as issued:
        call(prepare())
    return Call(
        size_bytes, prepare, call, wrong,
        cases.plan(name, {}, size_bytes, num_ranks), [(one.kind, one.num_bytes) for one in issued],
    )  # fmt: skip
