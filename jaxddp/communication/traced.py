"""Lists the collectives that are in no bucket plan, from the traced loss function: of zero3's units, and its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from ..scopes import SYNC_SCOPE
from .buckets import dtype_bytes

_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "psum": "all-reduce",  # of shards, along the replicas; over Gloo also what two ranks exchange: see gloo.py
    "psum_invariant": "all-reduce",  # its name under check_vma
    "all_to_all": "all-to-all",  # replaces a reduce-scatter over Gloo
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
}

_VARIES, _CONSTANT, _ZERO = range(3)  # what is known of a value when the program is compiled
_KEEP_ZERO = frozenset(
    "add_any bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy pad psum reduce_scatter"
    " reduce_sum reshape slice split squeeze transpose".split()
)
_NEVER_CONSTANT = frozenset("optimization_barrier pure_callback io_callback ffi_call".split())
_CALLS = frozenset("jit pjit shard_map closed_call custom_vjp_call".split())


class Planned(NamedTuple):
    """A planned collective.

    Attributes:
        kind: As in a compiled program.
        num_bytes: Of the full buffer on the wire.
        axes: The mesh axes along which ranks take part.
    """

    kind: str
    num_bytes: int
    axes: tuple[str, ...]


class TracedCollectives(NamedTuple):
    """Collectives in the order of the trace; those in a scan once per round.

    Attributes:
        each: Those of every micro-batch.
        once: Those of constants, which XLA takes out of the loop over micro-batches.
    """

    each: list[Planned]
    once: list[Planned]


def traced_collectives(program: core.ClosedJaxpr, platform: str, *, of_loss: bool = False) -> TracedCollectives:
    """Lists the gathers and scatters of shards that the program's results depend on.

    Args:
        program: From ``jax.make_jaxpr``.
        platform: What it is compiled for.
        of_loss: Instead those that the loss function calls itself, as BatchNorm does over an axis.
    """
    needed, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    found = TracedCollectives([], [])
    _collect(needed, platform, [_VARIES] * len(needed.invars), found, 1, of_loss, is_sync=False)
    return found


def _collect(
    jaxpr: Any, platform: str, inputs: Sequence[int], found: TracedCollectives, times: int, of_loss: bool, is_sync: bool
) -> list[int]:
    """Adds a program's collectives to ``found``; returns what is known of its results.

    A unit's unused parameters have a gradient of zeros, and XLA drops the scatter of nothing but zeros.
    """
    known = {**dict.fromkeys(jaxpr.constvars, _CONSTANT), **dict(zip(jaxpr.invars, inputs, strict=True))}

    def of(atom: Any) -> int:
        if isinstance(atom, core.Literal):
            return _ZERO if np.ndim(atom.val) == 0 and atom.val == 0 else _CONSTANT
        return known[atom]

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [of(atom) for atom in equation.invars]
        result = _VARIES if name in _NEVER_CONSTANT else min(operands, default=_CONSTANT)
        if name == "dynamic_slice" and operands[0] == _ZERO:
            result = _ZERO  # wherever it starts
        elif result == _ZERO and name not in _KEEP_ZERO:
            result = _CONSTANT
        kind = _KINDS.get(name)
        # The names inside a call may lack those of its own scope.
        in_sync = is_sync or SYNC_SCOPE in str(equation.source_info.name_stack)
        if kind and in_sync != of_loss and min(operands, default=_ZERO) != _ZERO:
            full = (equation.outvars if kind == "all-gather" else equation.invars)[0].aval
            of_kind = found.once if min(operands) == _CONSTANT else found.each
            axes = equation.params.get("axes") or equation.params["axis_name"]
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            of_kind += [Planned(kind, wire_bytes(full.size, full.dtype, platform), axes)] * times
        if name == "mul" and _ZERO in operands:
            result = _ZERO
        results = [result] * len(equation.outvars)
        rounds = equation.params["length"] if name == "scan" else 1
        for inner in core.jaxprs_in_params(equation.params):
            is_call = name in _CALLS and len(inner.invars) == len(operands)
            given = operands if is_call else [_VARIES] * len(inner.invars)
            of_inner = _collect(inner, platform, given, found, times * rounds, of_loss, in_sync)
            results = of_inner if is_call else results
        known.update(zip(equation.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def wire_bytes(num_elements: int, dtype: Any, platform: str) -> int:
    """Counts the bytes of a buffer that is summed: XLA's collectives for CPUs convert bfloat16 to float32.

    Args:
        num_elements: Of the buffer.
        dtype: Of the buffer.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Returns:
        Bytes.

    Example:
        >>> wire_bytes(8, "bfloat16", "cpu"), wire_bytes(8, "bfloat16", "gpu")
        (32, 16)
    """
    name = str(dtype)
    return num_elements * (4 if (platform, name) == ("cpu", "bfloat16") else dtype_bytes(name))
