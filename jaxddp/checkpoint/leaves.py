"""What a checkpoint says of its leaves: written when it is saved, compared when it is restored.

A row of the table in ``about/metadata`` is a leaf's name, shape, dtype and checksum. A checkpoint fits if its
parameters and its optimizer state have the names and shapes of those wanted, and dtypes that lose nothing: bfloat16 may
be restored in float32, as under a strategy that keeps wide masters, and not the other way round.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..training.state_layout import Leaf
from ..training.step import TrainState
from ..tree import named_leaves
from .host_state import is_key

_OWNERS = {"params": ("parameter", "model"), "opt_state": ("optimizer state", "optimizer")}

Row = Mapping[str, Any]
"""``shape, dtype, crc32`` of one leaf, and for PRNG keys ``impl``, what draws from them."""


def describe(leaf: jax.Array, where: Leaf, array: np.ndarray) -> Row:
    """Describes a leaf that is saved.

    Args:
        leaf: Over the ranks.
        where: What it is on the host.
        array: It, on the host.

    Returns:
        Its row.
    """
    row = {"shape": list(where.shape), "dtype": str(where.dtype), "crc32": checksum(array)}
    return row | {"impl": str(jax.random.key_impl(leaf))} if is_key(leaf) else row


def checksum(data: np.ndarray | dict[str, Any]) -> int:
    """Sums up the bytes of an array, or of what JSON has."""
    return zlib.crc32(json.dumps(data).encode() if isinstance(data, dict) else data.reshape(-1).view(np.uint8).data)


def check_model(checkpoint: str, saved: Mapping[str, Row], params: Any) -> None:
    """Refuses a checkpoint whose parameters have other names or shapes.

    Args:
        checkpoint: Which it is, in words.
        saved: Its rows.
        params: The tree wanted, of whole arrays or what describes them.

    Raises:
        ValueError: If a parameter differs, in words on the first one.
    """
    _check_shapes(checkpoint, "params", saved, params)


def check_fits(checkpoint: str, saved: Mapping[str, Row], places: TrainState) -> None:
    """Refuses a checkpoint whose optimizer state has other names or shapes, or with dtypes wider than those wanted.

    Args:
        checkpoint: Which it is, in words.
        saved: Its rows; of the model wanted.
        places: The state wanted, of ``Leaf``.

    Raises:
        ValueError: If a leaf differs, in words on the first one.
    """
    _check_shapes(checkpoint, "opt_state", saved, places.opt_state)
    wanted = named_leaves(places)
    for name, row in saved.items():
        owner, _, leaf_name = name.partition(".")
        if owner not in _OWNERS or _holds(wanted[name], row):
            continue
        remedy = "params (or a master_dtype)" if owner == "params" else "an optimizer"
        raise ValueError(
            f"{checkpoint} has {_OWNERS[owner][0]} {leaf_name!r} in {row['dtype']}, of which {wanted[name].dtype} here "
            f"would lose bits: restore with {remedy} of {row['dtype']}"
        )


def _check_shapes(checkpoint: str, owner: str, saved: Mapping[str, Row], wanted: Any) -> None:
    what, whole = _OWNERS[owner]
    theirs = {
        name: (row["dtype"], tuple(row["shape"])) for name, row in saved.items() if name.partition(".")[0] == owner
    }
    ours = {
        name: (getattr(leaf, "dtype", type(leaf).__name__), np.shape(leaf))
        for name, leaf in named_leaves({owner: wanted}).items()
    }
    for name in ours | theirs:
        if name in ours and name in theirs and ours[name][1] == theirs[name][1]:
            continue
        there, here = (" ".join(map(str, found[name])) if name in found else "missing" for found in (theirs, ours))
        raise ValueError(
            f"{checkpoint} is of another {whole}: {what} {name.partition('.')[2]!r} is {there} there and {here} here"
        )


def _holds(leaf: Leaf, row: Row) -> bool:
    """Whether the dtype of a leaf has every number that the dtype of a saved one has."""
    if str(leaf.dtype) == row["dtype"]:
        return True
    if is_key(leaf) or "impl" in row:
        return False
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (leaf.dtype, row["dtype"])):
        return False
    ours, theirs = jnp.finfo(leaf.dtype), jnp.finfo(row["dtype"])
    return ours.nmant >= theirs.nmant and ours.maxexp >= theirs.maxexp and ours.minexp <= theirs.minexp
