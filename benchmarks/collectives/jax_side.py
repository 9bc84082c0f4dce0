"""The collectives in JAX: each is a program of its own, compiled for the mesh and read back before it runs.

Results go into new buffers. Every call is waited for: XLA aborts a process whose simulated devices have many calls in
flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import jaxddp
from jaxddp.communication import collectives, ring
from jaxddp.communication.planned import planned_exchange
from jaxddp.mesh import DATA_AXIS, platform_of

from ..harness.ranks import Ranks
from .cases import ELEMENT_BYTES, RINGS, brought_length, expected, num_wrong, options_of, plan, size_of, values
from .interleaving import Batch, Call, RanksJob, Side, Timed, measure

KINDS = {
    "all_reduce": "all-reduce",
    "broadcast": "all-reduce",  # XLA has no broadcast and no reduce for every backend: see communication/collectives.py
    "reduce": "all-reduce",
    "send_recv": "collective-permute",
}


def run(ranks: Ranks, job: RanksJob) -> None:
    """Measures; runs in each of JAX's processes, before JAX has started there."""
    mesh = ranks.mesh()

    def ready(batch: Batch) -> Callable[[str], Call]:
        lengths = {name: brought_length(name, batch.asked_bytes, mesh.size) for name in batch.names}
        inputs = {length: _input(mesh, length) for length in set(lengths.values())}
        return lambda name: _compiled(mesh, name, batch.asked_bytes, inputs[lengths[name]])

    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    measure(job, Side(mesh.devices.flat[0].device_kind, versions), ready, jax.block_until_ready)


def _compiled(mesh: Mesh, name: str, asked_bytes: int, given: jax.Array) -> Call:
    program = jax.jit(mapped(mesh, name)).lower(given).compile()
    found = jaxddp.read_schedule(program).collectives()
    size_bytes = size_of(name, asked_bytes, mesh.size)
    timed = Timed(
        name,
        asked_bytes,
        size_bytes,
        planned=planned(mesh, name, size_bytes),
        found=[(one.kind, one.num_bytes) for one in found],
        kernel=", ".join(sorted({one.kernel for one in found if one.kernel})) or None,
    )
    length = size_bytes // ELEMENT_BYTES
    call = Call(lambda: given, program, lambda result: _num_wrong(result, name, mesh.size, length), timed)
    call.try_out()
    return call


def mapped(mesh: Mesh | AbstractMesh, name: str) -> Callable[[jax.Array], jax.Array]:
    """A collective over all ranks, of an array that is sharded over them."""
    options, spec = options_of(name, mesh.size), PartitionSpec(DATA_AXIS)
    collective = getattr(ring if name in RINGS else collectives, name)

    def call(x: jax.Array) -> jax.Array:
        return collective(x, DATA_AXIS, **options)

    return jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def planned(mesh: Mesh | AbstractMesh, name: str, size_bytes: int) -> list[tuple[str, int]]:
    """What a collective should compile to."""
    exchange = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}.get(name)
    if exchange:
        elements = size_bytes // ELEMENT_BYTES
        return [planned_exchange(exchange, elements, "float32", mesh.size, platform_of(mesh))]
    return plan(name, KINDS, size_bytes, mesh.size)


def _input(mesh: Mesh, length: int) -> jax.Array:
    """The values of all ranks; each process makes those of its own ranks."""
    return jax.make_array_from_callback(
        (mesh.size * length,),
        NamedSharding(mesh, PartitionSpec(DATA_AXIS)),
        lambda index: values(_start(index) // length, length),
    )


def _num_wrong(result: jax.Array, name: str, num_ranks: int, length: int) -> int:
    shards = result.addressable_shards
    return sum(
        num_wrong(np.asarray(each.data), expected(name, _start(each.index) // each.data.size, num_ranks, length))
        for each in shards
    )


def _start(index: Any) -> int:
    return index[0].start or 0
