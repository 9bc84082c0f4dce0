"""How often the loops of a compiled program run.

CPU and GPU programs print it (``known_trip_count``). TPU programs do not: there it is that of a counter which starts,
steps and ends at constants, as ``jax.lax.scan`` and ``fori_loop`` make it.
"""

from __future__ import annotations

import re

from .hlo import Computation, Instruction, Module, root_of


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Says how often a loop runs.

    Args:
        module: Where it stands.
        loop: Its ``while``.

    Returns:
        The number of rounds; None if the text does not tell.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known.group(1))
    where = next(computation for computation in module.computations.values() if computation.get(loop.name) is loop)
    body, condition = (module.computations[loop.attribute(key).removeprefix("%")] for key in ("body", "condition"))
    before, after, compare = where[loop.operands[0]], root_of(body), root_of(condition)
    if compare.attribute("direction") != "LT" or before.opcode != "tuple" or after.opcode != "tuple":
        return None
    place = _place_in_state(compare.operands[0], condition)
    if place is None:
        return None
    add = body[after.operands[place]]
    if add.opcode != "add" or _place_in_state(add.operands[0], body) != place:
        return None
    first = _constant(before.operands[place], where)
    step = _constant(add.operands[1], body)
    end = _constant(compare.operands[1], condition)
    if first is None or step is None or end is None or step < 1:
        return None
    return max(0, -((first - end) // step))


def _place_in_state(name: str, computation: Computation) -> int | None:
    """Which part of the loop's state an instruction of its body or condition is."""
    instruction = computation[_origin(name, computation)]
    if instruction.opcode != "get-tuple-element" or computation[instruction.operands[0]].opcode != "parameter":
        return None
    return instruction.integers("index")[0]


def _origin(name: str, computation: Computation) -> str:
    """What an instruction is a copy of."""
    while computation[name].opcode in ("copy", "bitcast"):
        name = computation[name].operands[0]
    return name


def _constant(name: str, computation: Computation) -> int | None:
    name = _origin(name, computation)
    literal = computation[name].literal
    is_integer = computation[name].opcode == "constant" and re.fullmatch(r"-?\d+", literal)
    return int(literal) if is_integer else None
