"""The same step without its communication, whose time is the baseline of exposed communication.

Collectives are replaced where both frameworks hand them over: JAX's at their primitives, while a program is traced;
torch's at the process group, while a step runs. Only buffers of gradients and parameters are held back: the loss and
norms, fewer than ``SMALL`` values or a few for each rank, still go. What trains like this computes as much as before,
and nonsense.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

SMALL = 16


@contextlib.contextmanager
def traced_without_communication() -> Iterator[None]:
    """Traces JAX's collectives as operations of the rank alone."""
    import jax.numpy as jnp
    from jax import lax
    from jax._src.lax import parallel

    def gather(x: Any, *, all_gather_dimension: int, axis_size: int, tiled: bool, **_: Any) -> Any:
        join = jnp.concatenate if tiled else jnp.stack
        return join([x] * axis_size, axis=all_gather_dimension)

    def scatter(x: Any, *, scatter_dimension: int, axis_size: int, tiled: bool, axis_name: Any, **_: Any) -> Any:
        length = x.shape[scatter_dimension] // axis_size if tiled else 1
        start = lax.axis_index(axis_name) * length
        part = lax.dynamic_slice_in_dim(x, start, length, scatter_dimension)
        return part if tiled else jnp.squeeze(part, scatter_dimension)

    def same(x: Any, **_: Any) -> Any:
        return x

    local: dict[str, Callable[..., Any]] = {
        "psum_p": same, "psum_invariant_p": same, "all_gather_p": gather, "all_gather_invariant_p": gather,
        "reduce_scatter_p": scatter, "all_to_all_p": same, "ppermute_p": same,
    }  # fmt: skip
    replaced = []
    try:
        for name, replacement in local.items():
            if (primitive := getattr(parallel, name, None)) is None:
                continue

            def bind(*args: Any, bind: Any = primitive.bind, replacement: Any = replacement, **params: Any) -> Any:
                if len(args) != 1 or args[0].size < SMALL:
                    return bind(*args, **params)
                return replacement(args[0], **params)

            primitive.bind = bind
            replaced.append(primitive)
        yield
    finally:
        for primitive in replaced:
            del primitive.bind  # of the instance: the class has the real one


@contextlib.contextmanager
def stepped_without_communication() -> Iterator[None]:
    """Completes torch's collectives at once, with buffers of the right shape."""
    import torch.distributed as dist
    from torch.futures import Future

    class Done(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            return True

        def get_future(self) -> Any:
            future: Any = Future()
            future.set_result([])
            return future

    def reduce(group: Any, tensors: Any, *_: Any) -> Any:
        return Done()

    def gather(group: Any, full: Any, part: Any, *_: Any) -> Any:
        full.view(group.size(), -1).copy_(part.view(1, -1))
        return Done()

    def scatter(group: Any, part: Any, full: Any, *_: Any) -> Any:
        part.view(-1).copy_(full.view(group.size(), -1)[group.rank()])
        return Done()

    local: dict[str, Callable[..., Any]] = {
        "allreduce": reduce, "_allgather_base": gather, "all_gather_single": gather,
        "_reduce_scatter_base": scatter, "reduce_scatter_single": scatter,
    }  # fmt: skip
    group_type: Any = dist.ProcessGroup
    kept = {name: vars(group_type)[name] for name in local if name in vars(group_type)}  # they bind, unlike attributes
    try:
        for name in kept:
            original = getattr(group_type, name)

            def call(group: Any, *args: Any, original: Any = original, local: Any = local[name]) -> Any:
                first = args[0][0] if isinstance(args[0], list) else args[0]
                return local(group, *args) if first.numel() >= max(SMALL, group.size() + 4) else original(group, *args)

            setattr(group_type, name, call)
        yield
    finally:
        for name, original in kept.items():
            setattr(group_type, name, original)
