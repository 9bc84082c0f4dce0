"""Lists the collectives of a traced loss function: those of zero3's units are in no bucket plan."""

from __future__ import annotations

from typing import Any

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


def traced_collectives(program: core.ClosedJaxpr, platform: str) -> list[tuple[str, int]]:
    """Lists the gathers and scatters of shards that the program's results depend on.

    Args:
        program: From ``jax.make_jaxpr``.
        platform: What it is compiled for.

    Returns:
        ``(kind, bytes of the full buffer on the wire)`` in the order of the trace; those in a scan once per round.
    """
    needed, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    return _collectives(needed, platform)


def _collectives(jaxpr: Any, platform: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for equation in jaxpr.eqns:
        kind = _KINDS.get(equation.primitive.name)
        if kind and SYNC_SCOPE in str(equation.source_info.name_stack):
            full = (equation.outvars if kind == "all-gather" else equation.invars)[0].aval
            found.append((kind, wire_bytes(full.size, full.dtype, platform)))
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in core.jaxprs_in_params(equation.params):
            found += _collectives(inner, platform) * times
    return found
