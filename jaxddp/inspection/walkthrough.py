"""ZeRO on six parameters: what each of two ranks holds after each phase of a training step.

A ``Linear(2, 2)`` has a kernel of 4 elements and a bias of 2. A rank owns half of each, 3 elements in all, and keeps
Adam's two moments of those only. The numbers are counted from a rank's arrays, not computed.

    python -m jaxddp.walkthrough

A trainer's step is one program. Here each phase is a separate program, made of the same functions, so that arrays can
be counted between phases. Collectives are read from the compiled programs. ``zero2`` holds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..communication.compression import none
from ..communication.reduction import REDUCE_SCATTER, finish_reduction, start_reduction
from ..compiled.schedule import gradient_collectives
from ..mesh import DATA_AXIS, data_mesh, simulate_devices
from ..strategy import plan_gradients
from ..training.placement import place
from ..training.state_layout import state_layout
from ..training.xla import compile_options
from ..tree import like
from ..zero.stage1 import gather_params, local_shards, zero1

NUM_RANKS = 2


class Holding(NamedTuple):
    """What one rank holds after a phase, in elements."""

    phase: str
    rank: int
    parameters: int
    exp_avg: int  # Adam's first moment, ``mu`` in optax
    exp_avg_sq: int  # its second, ``nu``
    gradients: int
    sent: str  # kinds of the collectives in the phase's program, each once


def walk(mesh: Mesh | None = None) -> list[Holding]:
    """Takes one step of ``zero1`` and Adam on two ranks, by default simulated ones: what each holds, phase by phase."""
    if mesh is None:
        simulate_devices(NUM_RANKS)
        mesh = data_mesh(NUM_RANKS)
    return [holding for holdings, _ in _phases(mesh) for holding in holdings]


def main() -> None:
    """Prints the holdings as a table."""
    row = "{:<26} {:>4} {:>11} {:>8} {:>11} {:>10}  {}"
    print(row.format(*Holding._fields))
    for holding in walk():
        print(row.format(*holding).rstrip())


class _Held(NamedTuple):
    """Arrays that live between two phases."""

    params: Any
    opt_state: Any
    grads: Any = ()


def _phases(mesh: Mesh) -> Iterator[tuple[list[Holding], _Held]]:
    replicated, by_rank = PartitionSpec(), PartitionSpec(DATA_AXIS)
    params, x = _linear(), jnp.array([[1.0, 1.0], [2.0, 2.0]])
    optimizer = optax.with_extra_args_support(optax.adam(0.1))
    plan = plan_gradients(zero1(), jax.grad(_loss), params, x[:1])
    layout = state_layout(params, optimizer, zero1(), NUM_RANKS)
    state_specs = layout.specs(DATA_AXIS).opt_state

    def init(params: Any) -> Any:
        return optimizer.init(local_shards(params, DATA_AXIS))

    def backward(params: Any, x: jax.Array) -> Any:
        local = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, DATA_AXIS, to="varying"), params)
        return jax.tree.map(lambda grad: grad[None], jax.grad(_loss)(local, x))

    def synchronise(grads: Any) -> Any:
        reduction, _ = start_reduction(jax.tree.map(lambda grad: grad[0], grads), plan, DATA_AXIS, REDUCE_SCATTER, none)
        return finish_reduction(reduction, plan, NUM_RANKS, REDUCE_SCATTER, NUM_RANKS).grads

    def update(params: Any, opt_state: Any, means: Any) -> tuple[Any, Any]:
        shards = local_shards(params, DATA_AXIS)
        grads = jax.tree.map(lambda grad, shard: grad.reshape(shard.shape), like(shards, means), shards)
        updates, opt_state = optimizer.update(grads, opt_state, shards)
        return gather_params(optax.apply_updates(shards, updates), params, plan, DATA_AXIS), opt_state

    def run(function: Callable[..., Any], specs: Any, *args: Any) -> tuple[Any, str]:
        program = _compile(function, specs, mesh, args)
        return program(*args), ", ".join(dict.fromkeys(kind for kind, _ in gradient_collectives(program)))

    params = place(params, layout.params, mesh)
    x = jax.device_put(x, NamedSharding(mesh, by_rank))
    held = _Held(params, run(init, ((replicated,), state_specs), params)[0])
    yield _count("before", held, mesh), held
    grads, sent = run(backward, ((replicated, by_rank), by_rank), held.params, x)
    held = held._replace(grads=grads)
    yield _count("backward", held, mesh, sent), held
    grads, sent = run(synchronise, ((by_rank,), by_rank), held.grads)
    held = held._replace(grads=grads)
    yield _count("gradients synchronised", held, mesh, sent), held
    (params, opt_state), sent = run(update, ((replicated, state_specs, by_rank), (replicated, state_specs)), *held)
    held = held._replace(params=params, opt_state=opt_state)
    yield _count("own part updated, gathered", held, mesh, sent), held


def _compile(function: Callable[..., Any], specs: tuple[Any, Any], mesh: Mesh, args: Any) -> Any:
    ins, outs = specs
    sharded = jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    options = compile_options(zero1(), mesh.devices.flat[0].platform)
    return jax.jit(sharded, compiler_options=options).lower(*args).compile()


def _count(phase: str, held: _Held, mesh: Mesh, sent: str = "") -> list[Holding]:
    def on(device: jax.Device, tree: Any) -> int:
        shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
        return sum(shard.data.size for shard in shards if shard.device == device)

    moments = held.opt_state[0]
    return [
        Holding(
            phase, rank, on(device, held.params), on(device, moments.mu), on(device, moments.nu),
            on(device, held.grads), sent,
        )
        for rank, device in enumerate(mesh.devices.flat)
    ]  # fmt: skip


def _linear() -> dict[str, jax.Array]:
    return {"bias": jnp.ones(2), "kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]])}


def _loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.sum((x @ params["kernel"] + params["bias"]) ** 2)


if __name__ == "__main__":
    main()
