"""Where each leaf of a training state lies: full on every rank, or cut into shards.

=============== ===================== ====================== ======================
leaf            replicated            zero1, zero2           zero3
=============== ===================== ====================== ======================
parameter       full                  full, or shards        shards, small ones full
copies          full                  full                   none
ema             full                  shards                 as the parameter
optimizer state full                  shards where it mirrors a parameter, else full
  of whole ones                       that of the parameters that the rank owns (zero/leaves.py)
step, key ...   full                  full                   full
memory          each rank its own     none                   none
=============== ===================== ====================== ======================

With a ``compute_dtype``, the parameters are the masters that the optimizer updates, and the loss takes copies in that
dtype. Where copies are full, ZeRO 1 and 2 shard the masters; ZeRO 3 casts when it gathers. Without one there are no
copies, and ZeRO 1 and 2 have full parameters.

The shards of a leaf are one array of ``Cut.global_shape``, split over the shard axis along its last dimension; ranks
along a replica axis hold equal shards. The
compression's state of a parameter is one array too, split over the ranks along its first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..communication.axes import shard_axis
from ..communication.collectives import Axis
from ..communication.sharding import Blocks, Cut
from ..strategy import Strategy
from ..tree import merge, named_leaves, path_name, split, tensor_specs
from ..zero.elementwise import check_elementwise, sharded_state
from ..zero.leaves import LeafOwners, OwnedState
from .packing import leaf_specs
from .step import TrainState
from .validation import abstract


@dataclass(frozen=True)
class Leaf:
    """Where one leaf lies.

    Attributes:
        shape: Of the full leaf.
        dtype: Its dtype.
        cut: How it, or each of its blocks, is cut into shards; None if every rank has all of it.
        blocks: How it is split along the mesh axes that are not of ranks; None if it is not.
    """

    shape: tuple[int, ...]
    dtype: Any
    cut: Cut | None = None
    blocks: Blocks | None = None

    @property
    def held(self) -> jax.ShapeDtypeStruct:
        """The array over all ranks."""
        return jax.ShapeDtypeStruct(self._shape(self.cut.global_shape) if self.cut else self.shape, self.dtype)

    @property
    def on_rank(self) -> jax.ShapeDtypeStruct:
        """One rank's part."""
        return jax.ShapeDtypeStruct(self._shape(self.cut.shard_shape) if self.cut else self.shape, self.dtype)

    @property
    def bytes_on_rank(self) -> int:
        """Bytes of one rank's part."""
        return self.on_rank.size * self.on_rank.dtype.itemsize

    def spec(self, axis: Axis) -> PartitionSpec:
        """How the array lies over the ranks, for ``shard_map``."""
        return self.cut.spec(shard_axis(axis)) if self.cut else PartitionSpec()

    def sharding(self, mesh: Mesh | AbstractMesh, axis: Axis) -> NamedSharding:
        """How the array lies over the mesh."""
        spec = self.spec(axis)
        if self.blocks is not None:
            spec = PartitionSpec(*spec[:-1], (*spec[-1:], *self.blocks.axes)) if self.cut else self.blocks.spec
        return NamedSharding(mesh, spec)

    def to_global(self, tensor: jax.Array) -> jax.Array:
        """Lays a full leaf out as the array over all ranks: rank by rank, and block by block."""
        if self.cut is None or self.blocks is None:
            return tensor if self.cut is None else self.cut.to_global(tensor)
        numpy = np if isinstance(tensor, np.ndarray) else jnp
        chunks = numpy.stack([self.cut.to_chunks(block) for block in self.blocks.split(tensor)])
        by_block = chunks.reshape(len(chunks), self.cut.num_ranks, self.cut.rows, -1)
        return by_block.transpose(2, 1, 0, 3).reshape(self.held.shape)

    def from_global(self, array: jax.Array) -> jax.Array:
        """Undoes ``to_global``."""
        if self.cut is None or self.blocks is None:
            return array if self.cut is None else self.cut.from_global(array)
        numpy = np if isinstance(array, np.ndarray) else jnp
        by_row = array.reshape(self.cut.rows, self.cut.num_ranks, math.prod(self.blocks.counts), -1)
        return self.blocks.join(numpy.stack([self.cut.from_chunks(one) for one in by_row.transpose(2, 1, 0, 3)]))

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of all blocks' shards, from that of one's."""
        return (*shape[:-1], shape[-1] * math.prod(self.blocks.counts)) if self.blocks else shape


@dataclass(frozen=True)
class StateLayout:
    """How the state of one model lies over the ranks.

    Attributes:
        params: A tree of ``Leaf`` like the parameters.
        opt_state: A tree of ``Leaf`` like the optimizer's state.
        memory: State of the compression before the first step, NumPy arrays ``[num_ranks, ...]``.
        copies: A tree like the parameters, of ``Leaf`` where the loss takes a copy in the compute dtype, else None;
            empty if it takes the parameters themselves.
        ema: A tree of ``Leaf`` like the trainable parameters, where their moving average is kept, else empty.
        leaves: Who owns which part of the optimizer's state, where ranks own it by whole parameters.
    """

    params: Any
    opt_state: Any
    memory: Any = ()
    copies: Any = ()
    ema: Any = ()
    leaves: LeafOwners | None = None

    def specs(self, axis: Axis) -> Any:
        """Gives a ``TrainState`` of the ``PartitionSpec`` of each leaf."""
        params, opt_state, ema = jax.tree.map(lambda leaf: leaf.spec(axis), (self.params, self.opt_state, self.ema))
        memory = jax.tree.map(lambda array: PartitionSpec(axis), self.memory)
        whole: Any = PartitionSpec()
        return TrainState(whole, params, opt_state, whole, memory, whole, whole, whole, ema)

    def shardings(self, mesh: Mesh | AbstractMesh, axis: Axis) -> Any:
        """Gives a ``TrainState`` of the ``NamedSharding`` of each leaf, or of a prefix of them."""
        on_ranks = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs(axis))
        params, opt_state, copies, ema = jax.tree.map(
            lambda leaf: leaf.sharding(mesh, axis), (self.params, self.opt_state, self.copies, self.ema)
        )
        is_placed = any(leaf.blocks for leaf in jax.tree.leaves(self.copies))
        copies = copies if is_placed else on_ranks.copies  # which fits a state without copies, too
        return TrainState(
            on_ranks.step, params, opt_state, on_ranks.key, on_ranks.memory, on_ranks.model_state, on_ranks.loss_scale,
            copies, ema,
        )  # fmt: skip

    def whole(self) -> Any:
        """Describes the full parameters."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.params)

    def used(self) -> Any:
        """Gives the leaves that the loss takes outside of ZeRO 3: copies in place of their masters."""
        return merge(self.copies, self.params) if self.copies else self.params

    def held(self) -> TrainState:
        """Describes a state of step 0, as it lies over the ranks."""
        held = jax.tree.map(lambda leaf: leaf.held, (self.params, self.opt_state, self.copies, self.ema))
        params, opt_state, copies, ema = held
        step, key = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jax.random.key(0)))
        return TrainState(step, params, opt_state, key, abstract(self.memory), copies=copies, ema=ema)


def state_layout(
    params: Any,
    optimizer: optax.GradientTransformationExtraArgs,
    strategy: Strategy,
    num_ranks: int,
    trainable: Callable[[str], bool] | None = None,
    compute_dtype: Any = None,
    blocks: Mapping[str, Blocks] = MappingProxyType({}),
    *,
    has_ema: bool = False,
) -> StateLayout:
    """Lays a model's training state out over ranks.

    Args:
        params: A tree of full arrays or ``jax.ShapeDtypeStruct``.
        optimizer: Of the trainable parameters.
        strategy: What it shards, and how (``cut``).
        num_ranks: Number of ranks that the state is divided among, or that have a state of the compression each.
        trainable: Predicate on a parameter's name; None trains all.
        compute_dtype: Of the copies that the loss takes, where parameters are not sharded; None: there are none.
        blocks: How parameters are split along the mesh axes that are not of ranks, by name. An optimizer's leaf of the
            shape of a parameter, whose path ends with the parameter's, is split as that is.
        has_ema: Whether a moving average of the parameters is kept.

    Returns:
        The layout.

    Raises:
        ValueError: If the optimizer's state is to be cut, and the optimizer is not element-wise, or does not update
            parameters one by one where whole ones are to have owners.
    """
    params = jax.tree.map(partial(_as_master, strategy.precision.master_dtype), abstract(params))
    trained = split(params, trainable)[0]

    def leaf(struct: Any, cut: Cut | None, of: Blocks | None = None) -> Leaf:
        return Leaf(tuple(struct.shape), struct.dtype, cut, of)

    copies: Any = ()
    if compute_dtype is not None and not strategy.shards_params:
        copies = jax.tree_util.tree_map_with_path(
            lambda path, struct: (
                Leaf(struct.shape, compute_dtype, blocks=blocks.get(path_name(path))) if _is_float(struct) else None
            ),
            params,
        )

    if not strategy.shards_optimizer_state:
        shapes = {name: struct.shape for name, struct in named_leaves(params).items()}

        def mirror(path: Any, struct: Any) -> Leaf:
            name = f".{path_name(path)}"
            mirrored = [
                of for of, shape in shapes.items() if shape == struct.shape and name.endswith(f".{of}" if of else "")
            ]
            return leaf(struct, None, blocks.get(max(mirrored, key=len)) if mirrored else None)

        whole = jax.tree_util.tree_map_with_path(
            lambda path, struct: leaf(struct, None, blocks.get(path_name(path))), params
        )
        state = jax.tree_util.tree_map_with_path(mirror, jax.eval_shape(optimizer.init, trained))
        ema = split(whole, trainable)[0] if has_ema else ()
        return StateLayout(whole, state, _first_memory(trained, strategy, num_ranks), copies, ema)

    def cut(path: Any, struct: Any) -> Leaf:
        name = path_name(path)
        if jnp.issubdtype(struct.dtype, jax.dtypes.extended):  # PRNG keys have no elements to deal out
            return leaf(struct, None)
        tensor, of = tensor_specs({name: struct})[name], blocks.get(name)
        tensor = tensor._replace(shape=of.shape_of(tensor.shape)) if of else tensor
        found = strategy.cut(tensor, num_ranks)
        if found is not None and of is not None and of.counts[0] > 1:
            found = replace(found, by_row=False)  # a device has only some of the rows
        return leaf(struct, found, of)

    updated = jax.tree_util.tree_map_with_path(cut, params)
    ema = split(updated, trainable)[0]
    shards = jax.tree.map(lambda place: place.on_rank, ema)
    leaves = LeafOwners(optimizer, trained, num_ranks) if strategy.shards_leaves else None
    if leaves is not None:
        opt_state: Any = OwnedState(
            jax.tree.map(lambda slot: leaf(slot, None) if slot.param is None else None, leaves.slots),
            {dtype: _flat(num_ranks * width, dtype, num_ranks) for dtype, width in leaves.widths.items()},
        )
    else:
        check_elementwise(optimizer, trained, shards, value=jax.ShapeDtypeStruct((), jnp.float32))
        places = named_leaves(updated)
        opt_state = jax.tree.map(
            lambda mirror: (
                leaf(mirror, None)
                if mirror.param is None
                else leaf(mirror, places[mirror.param].cut, places[mirror.param].blocks)
            ),
            sharded_state(optimizer, trained),
        )
    if not strategy.shards_params:  # only a leaf with a full copy may be a shard itself
        updated = jax.tree.map(
            lambda place: place if copies and _is_float(place) else replace(place, cut=None), updated
        )
    return StateLayout(updated, opt_state, copies=copies, ema=ema if has_ema else (), leaves=leaves)


def _flat(size: int, dtype: str, num_ranks: int) -> Leaf:
    return Leaf((size,), jnp.dtype(dtype), Cut((size,), num_ranks))


def blocks_of(params: Any, param_specs: Any, mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> dict[str, Blocks]:
    """Gives how parameters are split along mesh axes that are not of ranks, by name; those that are not are left out.

    Args:
        params: A tree of full arrays or ``jax.ShapeDtypeStruct``.
        param_specs: A tree of ``PartitionSpec`` like it, or a prefix.
        mesh: Of ranks and other axes.
        axes: The other axes.

    Raises:
        ValueError: If the trees do not fit, or a spec names another axis, or one that does not divide a dimension.
    """
    if not axes:
        return {}
    try:
        specs = leaf_specs(param_specs, params)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"param_specs must be a tree of PartitionSpec like params, or a prefix: {reason}") from error
    found = {}
    for (name, leaf), spec in zip(named_leaves(params).items(), specs, strict=True):
        if not isinstance(spec, PartitionSpec) or not {*jax.tree.leaves(tuple(spec))} <= {*axes}:
            raise ValueError(f"param_specs of {name!r} (={spec}) must be a PartitionSpec over {', '.join(axes)}")
        try:
            block = NamedSharding(mesh, spec).shard_shape(tuple(leaf.shape))
        except ValueError as error:
            sizes = ", ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
            raise ValueError(
                f"param_specs of {name!r} (={spec}) must divide its shape {[*leaf.shape]} by the axes' sizes: {sizes}"
            ) from error
        if any(spec):
            shares = ([mesh.shape[axis] for axis in jax.tree.leaves(each)] for each in (*spec, *(None,) * leaf.ndim))
            found[name] = Blocks(spec, tuple(math.prod(share) for share, _ in zip(shares, block, strict=False)))
    return found


def _first_memory(trained: Any, strategy: Strategy, num_ranks: int) -> Any:
    init_state = strategy.compression.init_state
    if init_state is None:
        return ()
    first = {name: init_state(tensor) for name, tensor in tensor_specs(named_leaves(trained)).items()}
    return jax.tree.map(
        lambda array: np.broadcast_to(array, (num_ranks, *array.shape)),
        {name: memory for name, memory in first.items() if memory is not None},
    )


def _as_master(dtype: Any, struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, dtype) if dtype is not None and _is_float(struct) else struct


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
