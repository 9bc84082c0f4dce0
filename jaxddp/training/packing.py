"""``shard_map`` of functions of thousands of arrays, as one of few.

A training state has one array for each parameter, with Adam three. Shardy and XLA's partitioner take time quadratic in
the operands and results of a ``shard_map``: 10,000 take a hundred times as long as 1,000. Arrays of one dtype and one
sharding therefore go in and come out packed, ``PACK`` in one; their dtypes are no longer weak:

    array                        over all ranks                 on each rank
    ---------------------------  -----------------------------  ------------------------------------------
    whole on every rank, [..]    [1, n] of a pack [1, width]    [1, n] of a pack [1, width], as [..]
    shards, [1, .., N c]         [N, c] of a pack [N, width]    [1, c] of a pack [1, width], as [1, .., c]

All other arrays are passed one by one: batches, keys, stacks of layers cut by rows, the state of a compression.

Packing copies nothing: once the program is partitioned, XLA simplifies a slice of a concatenation to the array that was
concatenated. What is left is the program of ``jax.shard_map`` (``packing_test.py`` compares the two).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..communication.collectives import Axis

FEW = 2000  # arrays, which XLA handles in seconds
PACK = 128  # arrays


def shard_map(
    function: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh,
    in_specs: Any,
    out_specs: Any,
    axis: Axis | None = None,
) -> Callable[..., Any]:
    """Maps a function over the ranks of a mesh, as ``jax.shard_map(..., check_vma=False)`` does.

    Args:
        function: Of each rank's parts of the arrays.
        mesh: Of devices or of a target.
        in_specs: Trees of ``PartitionSpec``, prefixes of the arguments.
        out_specs: The same for the results.
        axis: Of the ranks, where the mesh has other axes, which are left to XLA; all of them if None. Arrays may be
            split along the others, and are not packed.

    Returns:
        A function of arrays over all ranks, to be compiled by ``jax.jit``: packs are copies until XLA has simplified.
    """
    axes = {*mesh.axis_names} if axis is None else {axis} if isinstance(axis, str) else {*axis}

    def mapped(*args: Any) -> Any:
        arrays, structure = jax.tree.flatten(args)
        # check_vma would make users mark the carries of their own loops as varying.
        if len(arrays) <= FEW or len(axes) < len(mesh.axis_names):
            options = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": axes}
            return jax.shard_map(function, mesh=mesh, check_vma=False, **options)(*args)
        ins = _groups(arrays, leaf_specs(in_specs, args), mesh.shape)
        # out_specs are needed before the results are traced: results are returned by kind of spec, one list for each.
        specs = jax.tree.leaves(out_specs, is_leaf=_is_spec)
        kinds = list(dict.fromkeys([PartitionSpec(), *specs, *(PartitionSpec(spec[-1]) for spec in specs if spec)]))
        traced: list[Any] = []

        def on_rank(packs: list[jax.Array]) -> list[list[jax.Array]]:
            result = function(*jax.tree.unflatten(structure, _unpack(packs, ins)))
            parts, result_structure = jax.tree.flatten(jax.tree.map(jnp.asarray, result))
            outs = _groups(parts, leaf_specs(out_specs, result), {})
            traced[:] = [result_structure, outs]
            packed = _pack(parts, outs)
            return [[pack for pack, group in zip(packed, outs, strict=True) if group.spec == spec] for spec in kinds]

        packs = jax.shard_map(
            on_rank, mesh=mesh, in_specs=([group.spec for group in ins],), out_specs=kinds, check_vma=False
        )(_pack(arrays, ins))
        result_structure, outs = traced
        of = {spec: iter(some) for spec, some in zip(kinds, packs, strict=True)}
        return jax.tree.unflatten(result_structure, _unpack([next(of[group.spec]) for group in outs], outs))

    return mapped


class _Group(NamedTuple):
    """Arrays that are packed into one, or one array by itself."""

    places: list[int]  # among all
    spec: PartitionSpec  # of the pack
    num_rows: int = 1  # of the pack on this side; shards have one for each rank along their axis
    shapes: Sequence[tuple[int, ...]] = ()  # of each, the length of the last dimension left open
    widths: Sequence[int] = ()  # of each in a pack


def _groups(arrays: Sequence[Any], specs: Sequence[PartitionSpec], sizes: Mapping[Any, int]) -> list[_Group]:
    """Groups arrays that are packed together.

    Args:
        arrays: All arguments, or all results.
        specs: How each lies over the ranks.
        sizes: Of the mesh axes that are divided among ranks on this side; none of them on a rank.

    Returns:
        Groups, which hold every place once.
    """
    alike: dict[Any, list[int]] = {}
    for place, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
        alike.setdefault(_kind(array, spec) or place, []).append(place)
    groups = []
    for kind, places in alike.items():
        for start in range(0, len(places), PACK):
            some = places[start : start + PACK]
            if len(some) == 1:
                groups.append(_Group(some, specs[some[0]]))
                continue
            _, axis = kind
            axes = axis if isinstance(axis, tuple) else (axis,)
            num_rows = math.prod(sizes.get(name, 1) for name in axes)
            shapes = [arrays[place].shape and (*arrays[place].shape[:-1], -1) for place in some]
            widths = [arrays[place].size // num_rows for place in some]
            groups.append(_Group(some, PartitionSpec(axis) if axis else PartitionSpec(), num_rows, shapes, widths))
    return groups


def _kind(array: Any, spec: PartitionSpec) -> tuple[Any, Any] | None:
    """What arrays of a pack share: the dtype, and the axis along which they are shards; None for an array by itself."""
    if array.size == 0 or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return None
    if not any(spec):
        return array.dtype, None
    is_row = array.size == array.shape[-1] and len(spec) == array.ndim and not any(spec[:-1])
    return (array.dtype, spec[-1]) if is_row else None


def _pack(arrays: Sequence[jax.Array], groups: Sequence[_Group]) -> list[jax.Array]:
    packs = []
    for group in groups:
        some = [arrays[place] for place in group.places]
        rows = [array.reshape(group.num_rows, -1) for array in some] if group.widths else some
        packs.append(jnp.concatenate(rows, 1) if group.widths else some[0])
    return packs


def _unpack(packs: Sequence[jax.Array], groups: Sequence[_Group]) -> list[jax.Array]:
    arrays: dict[int, jax.Array] = {}
    for pack, group in zip(packs, groups, strict=True):
        pieces = [pack]
        if group.widths:
            pieces = jnp.split(pack, np.cumsum(group.widths)[:-1], axis=1)
            pieces = [piece.reshape(shape) for piece, shape in zip(pieces, group.shapes, strict=True)]
        arrays.update(zip(group.places, pieces, strict=True))
    return [arrays[place] for place in range(len(arrays))]


def leaf_specs(prefix: Any, tree: Any) -> list[PartitionSpec]:
    """Gives the ``PartitionSpec`` of each leaf, from a prefix of the tree."""
    return jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=_is_spec), is_leaf=_is_spec)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
