"""NCCL's primitives by name, for use inside `jax.shard_map` or `jax.pmap`.

Every rank of a named axis calls the function with its own ``x``. N is the number of ranks, S the bytes of the full
buffer; nccl-tests multiplies S / time by the ``bus factor``, to compare with the speed of the links.

| function       | rank r gives    | rank r gets               | sent on a ring   | bus factor | compiles to        |
|----------------|-----------------|---------------------------|------------------|------------|--------------------|
| all_reduce     | x_r, [...]      | x_0 + ... + x_{N-1}       | 2 (N-1)/N S      | 2 (N-1)/N  | all-reduce         |
| reduce_scatter | x_r, [N k, ...] | part r of it, [k, ...]    | (N-1)/N S        | (N-1)/N    | reduce-scatter     |
| all_gather     | x_r, [k, ...]   | all x_i,      [N k, ...]  | (N-1)/N S        | (N-1)/N    | all-gather         |
| broadcast      | x_r, [...]      | x_root                    | 2 (N-1)/N S      | 1          | all-reduce         |
| reduce         | x_r, [...]      | the sum, 0 off the root   | 2 (N-1)/N S      | 1          | all-reduce         |
| send_recv      | x_r, [...]      | x_s if (s, r) is a pair   | S if it sends    | 1          | collective-permute |

Sums are in the dtype of ``x``. Under ``check_vma=True`` the results of `all_reduce` and `broadcast` may leave
`jax.shard_map` under ``out_specs=P()``; those of the others may not.

Between processes on CPUs XLA uses Gloo, whose reduce-scatter gives rank 0 wrong parts of large chunks, without an error
(https://github.com/jax-ml/jax/issues/40830): an all-to-all replaces it. Between two ranks, an all-reduce of their bits
is faster than what exchanges them (https://github.com/jax-ml/jax/issues/40831).

References:
    NVIDIA, nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arguments import check_pairs, check_root
from .buckets import length_of_chunk, tpu_width

Axis = str | tuple[str, ...]
"""The name of a mesh axis, or of several, whose ranks are numbered in that order."""

_silent: ContextVar[bool] = ContextVar("jaxddp_silent", default=False)


@contextmanager
def silent() -> Iterator[None]:
    """Makes the functions here send nothing inside the block: a rank takes its own array for those of the others."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def is_silent() -> bool:
    """Whether the caller is inside ``silent``."""
    return _silent.get()


def all_reduce(x: jax.Array, axis: Axis) -> jax.Array:
    """Sums over the ranks, by a plain `lax.psum`: compile options decide whether XLA merges it with its neighbours."""
    return x if is_silent() else lax.psum(x, axis)


def traced_platform() -> str:
    """The platform of the mesh that is being traced for, or else of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def varying(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which an array may vary, or is one of the terms of a sum; none where ``check_vma`` is off."""
    kind = jax.typeof(x)
    if not hasattr(kind, "manual_axis_type"):
        return frozenset(kind.vma)
    return frozenset(kind.manual_axis_type.varying | kind.manual_axis_type.unreduced)


def as_varying(tree: Any, axis: Axis) -> Any:
    """Declares arrays different on the ranks of an axis, so that autodiff does not sum their gradients over it."""
    manual = jax.sharding.get_abstract_mesh().manual_axes  # which an axis of jax.vmap, in place of ranks, is not
    axes = [name for name in ((axis,) if isinstance(axis, str) else axis) if name in manual]

    def declare(leaf: jax.Array) -> jax.Array:
        missing = tuple(name for name in axes if name not in varying(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(declare, tree)


def joins_arrays() -> bool:
    """Whether one all-reduce takes several arrays here: on GPUs."""
    return traced_platform() in ("gpu", "cuda")


def kind_of(kind: str, num_ranks: int, platform: str) -> str:
    """The collective that implements a ``"reduce-scatter"``, an ``"all-gather"`` or an ``"all-to-all"`` here."""
    if platform != "cpu" or not jax.distributed.is_initialized():
        return kind
    if num_ranks == 2:
        return "all-reduce"  # see ``_swap``
    return "all-to-all" if kind == "reduce-scatter" else kind


def reduce_scatter(x: jax.Array, axis: str) -> jax.Array:
    """Sums over the ranks; rank r gets the r-th of N equal parts of the sum; a ValueError if N does not divide it."""
    num_ranks = lax.axis_size(axis)
    chunk_length = length_of_chunk(x.shape, num_ranks)
    if x.size == 0 or is_silent():
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * chunk_length, chunk_length)
    if kind_of("reduce-scatter", num_ranks, traced_platform()) != "reduce-scatter":
        dtype = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        first, *others = all_to_all(x.reshape(num_ranks, -1, *x.shape[1:]), axis).astype(dtype)
        return sum(others, first).astype(x.dtype)  # XLA for CPUs takes 40 times as long for a sum over dimension 0
    if chunk_length == 1 and x.ndim == 2 and traced_platform() == "tpu":  # see _padded
        tiles = _padded(x).reshape(num_ranks, -1, 128)
        return lax.psum_scatter(tiles, axis, scatter_dimension=0, tiled=True).reshape(1, -1)[:, : x.shape[1]]
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


def all_gather(x: jax.Array, axis: Axis, *, equal: bool = False, as_bits: bool = False) -> jax.Array:
    """Concatenates the ranks' arrays along dimension 0, which ``x`` must have; every rank gets the full array.

    ``equal`` declares the result equal on all ranks for ``check_vma=True``; its gradient is then one rank's.
    ``as_bits`` sends bfloat16 as integers, without a derivative: XLA for CPUs would send float32.
    """
    num_ranks = lax.axis_size(axis)
    length_of_chunk(x.shape, 1)
    if x.size == 0 or is_silent():
        return jnp.concatenate([x] * num_ranks)
    if as_bits and x.dtype == jnp.bfloat16 and traced_platform() == "cpu":
        return all_gather(x.view(jnp.uint16), axis, equal=equal).view(x.dtype)
    # Under check_vma, only what comes out of a collective counts as equal.
    is_known_equal = equal and varying(lax.axis_index(axis))
    if kind_of("all-gather", num_ranks, traced_platform()) == "all-reduce" and not is_known_equal:
        return jnp.concatenate(_in_rank_order(x, x, axis))
    to = "invarying" if equal else "varying"
    if len(x) == 1 and x.ndim == 2 and traced_platform() == "tpu":
        return lax.all_gather(_padded(x), axis, axis=0, tiled=True, to=to)[:, : x.shape[1]]
    return lax.all_gather(x, axis, axis=0, tiled=True, to=to)


def all_to_all(rows: jax.Array, axis: Axis, *, as_bits: bool = False) -> jax.Array:
    """Sends row o of ``[N, ...]`` to rank o; row r of the result is from rank r. ``as_bits`` as in `all_gather`."""
    if kind_of("all-to-all", len(rows), traced_platform()) == "all-reduce":
        rank = lax.axis_index(axis)
        return jnp.stack(_in_rank_order(rows[rank], rows[1 - rank], axis))
    if as_bits and rows.dtype == jnp.bfloat16 and traced_platform() == "cpu":
        return all_to_all(rows.view(jnp.uint16), axis).view(rows.dtype)
    return lax.all_to_all(rows, axis, split_axis=0, concat_axis=0)


def _in_rank_order(kept: jax.Array, sent: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """What one of two ranks keeps and what it is sent, in rank order, in one pass that XLA fuses without copies."""
    received, is_first = _swap(sent, axis), lax.axis_index(axis) == 0
    return jnp.where(is_first, kept, received), jnp.where(is_first, received, kept)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _swap(x: jax.Array, axis: Axis) -> jax.Array:
    """Gives each of two ranks the other's array: both sum their bits as unsigned integers, and take their own off."""
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    return (lax.psum(bits, axis) - bits).view(x.dtype)


_swap.defvjp(lambda x, axis: (_swap(x, axis), None), lambda axis, _, gradient: (_swap(gradient, axis),))


def broadcast(x: jax.Array, axis: str, root: int = 0) -> jax.Array:
    """Gives every rank the root's array, by an all-reduce of zeros but for the root's; -0.0 may arrive as 0.0."""
    # XLA has a broadcast on GPUs only, and ``check_vma=True`` accepts no other way's result as equal on all ranks.
    check_root(root, lax.axis_size(axis))
    return lax.psum(jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x)), axis).astype(x.dtype)


def reduce(x: jax.Array, axis: str, root: int = 0) -> jax.Array:
    """Sums over the ranks; the root gets the sum, the others zeros: XLA has no reduction to one rank."""
    check_root(root, lax.axis_size(axis))
    total = lax.psum(x, axis)
    return jnp.where(lax.axis_index(axis) == root, total, jnp.zeros_like(total))


def send_recv(x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends along ``pairs`` (from rank, to rank), where each rank occurs once at most a side; the others get zeros."""
    check_pairs(pairs, lax.axis_size(axis))
    return lax.ppermute(x, axis, pairs)


def _padded(rows: jax.Array) -> jax.Array:
    """Rows of one buffer, one a rank, of a length of which XLA for TPUs makes no all-reduce."""
    return jnp.pad(rows, ((0, 0), (0, tpu_width(rows.shape[1]) - rows.shape[1])))
