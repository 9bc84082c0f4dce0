"""Lists the collectives of zero3's units, which are in no bucket plan, from the traced loss function."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from ..scopes import SYNC_SCOPE
from ..strategy import wire_bytes

_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",  # replaces a reduce-scatter over Gloo: see gloo.py
}

_KEEP_ZERO = frozenset(
    "add_any broadcast_in_dim concatenate convert_element_type copy pad reduce_scatter reduce_sum reshape slice split"
    " squeeze transpose".split()
)


def traced_collectives(program: core.ClosedJaxpr, platform: str) -> list[tuple[str, int]]:
    """Lists the gathers and scatters of shards that the program's results depend on.

    Args:
        program: From ``jax.make_jaxpr``.
        platform: What it is compiled for.

    Returns:
        ``(kind, bytes of the full buffer on the wire)`` in the order of the trace; those in a scan once per round.
    """
    needed, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    return _collectives(needed, platform, [False] * len(needed.invars))[0]


def _collectives(jaxpr: Any, platform: str, is_zero: list[bool]) -> tuple[list[tuple[str, int]], list[bool]]:
    """Walks a program; says of its inputs, and then of its results, which are known to be zeros.

    A unit's unused parameters have a gradient of zeros, and XLA drops the scatter of nothing but zeros.
    """
    found: list[tuple[str, int]] = []
    zeros = {var for var, zero in zip(jaxpr.invars, is_zero, strict=True) if zero}

    def known(atom: Any) -> bool:
        return bool(atom.val == 0) if isinstance(atom, core.Literal) and np.ndim(atom.val) == 0 else atom in zeros

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [known(atom) for atom in equation.invars]
        kind = _KINDS.get(name)
        if kind and SYNC_SCOPE in str(equation.source_info.name_stack) and not all(operands):
            full = (equation.outvars if kind == "all-gather" else equation.invars)[0].aval
            found.append((kind, wire_bytes(full.size, full.dtype, platform)))
        keeps_zero = operands and (all(operands) if name in _KEEP_ZERO else name == "mul" and any(operands))
        results = [bool(keeps_zero)] * len(equation.outvars)
        times = equation.params["length"] if name == "scan" else 1
        for inner in core.jaxprs_in_params(equation.params):
            is_call = name in ("jit", "pjit", "shard_map", "closed_call") and len(inner.invars) == len(operands)
            more, of_inner = _collectives(inner, platform, operands if is_call else [False] * len(inner.invars))
            found += more * times
            results = of_inner if is_call else results
        zeros.update(var for var, zero in zip(equation.outvars, results, strict=True) if zero)
    return found, [known(atom) for atom in jaxpr.outvars]
