"""Lets the products of a backward pass write gradients in the dtype in which they are summed over ranks.

Where the loss takes bfloat16 copies of float32 parameters, the gradient of a matrix is a product that JAX rounds to
bfloat16, and that XLA for GPUs converts back in a kernel of its own: 4 % of a step of seed_xl on h100:8, simulated.

                                                                              bytes an element
    product -> write bfloat16 -> read -> write float32 -> all-reduce          2 + 2 + 4
    product -> write float32 -> all-reduce                                    4

The gradient is then not rounded. Two things that XLA does to such products would cost what this saves:

    products of one operand (gate and up)       are one product, of which each gradient     all but one get the operand
                                                is copied out                               behind a barrier
    those too small to fill a GPU (q, k and v)  apart, are cut along the sum, and their     left as they are
                                                parts added up
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ..communication.traces import bind, interpret

_MOVES = ("transpose", "reshape", "squeeze")  # what may stand between a product and the conversion of its result
_NARROW = jnp.dtype("bfloat16")
_FILLS_GPU = 2**21  # elements: tiles of 128 x 128, one for each of an H100's multiprocessors


def with_wide_products(grad_fn: Callable[..., tuple[Any, Any]], *args: Any) -> tuple[Any, Any]:
    """Gives ``grad_fn(*args)``, gradients and something else; products that nothing else uses write float32 at once."""
    program, out = jax.make_jaxpr(grad_fn, return_shape=True)(*args)
    leaves = jax.tree.leaves(args)
    products = _wide_products(program.jaxpr, num_grads=len(jax.tree.leaves(out[0])))

    def rule(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        apart = products.get(equation.outvars[0]) if equation.outvars else None
        if apart is not None:
            equation = equation.replace(params=equation.params | {"preferred_element_type": jnp.dtype("float32")})
            inputs = [
                lax.optimization_barrier(array) if index in apart else array for index, array in enumerate(inputs)
            ]
        return bind(program.jaxpr, equation, inputs)

    found = interpret(program, leaves, rule) if products else core.jaxpr_as_fun(program)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(out), found)


def _wide_products(jaxpr: Any, num_grads: int) -> dict[Any, set[int]]:
    """The products that are to write float32, by the variable of their result: which operands go behind a barrier."""
    made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    atoms = [*(atom for equation in jaxpr.eqns for atom in equation.invars), *jaxpr.outvars]
    uses = Counter(atom for atom in atoms if not isinstance(atom, core.Literal))

    def maker(atom: Any, primitives: Collection[str], most_uses: float = math.inf) -> Any:
        equation = None if isinstance(atom, core.Literal) or uses[atom] > most_uses else made_by.get(atom)
        return equation if equation is not None and equation.primitive.name in primitives else None

    def behind_moves(atom: Any, most_uses: float = math.inf) -> Any:
        while (move := maker(atom, _MOVES, most_uses)) is not None:
            (atom,) = move.invars
        return atom

    operands: dict[Any, list[Any]] = {}  # by the result of each product that can write float32
    for result in jaxpr.outvars[:num_grads]:
        conversion = maker(result, ["convert_element_type"])
        if conversion is not None and result.aval.dtype == jnp.float32:
            narrow = behind_moves(conversion.invars[0], most_uses=1)
            product = maker(narrow, ["dot_general"], most_uses=1)
            if product is not None and all(_is_narrow(atom) for atom in (narrow, *product.invars)):
                operands[narrow] = [behind_moves(atom) for atom in product.invars]
    num_products = Counter(operand for both in operands.values() for operand in {*both})
    wide, met = {}, set()
    for narrow, both in operands.items():
        shared = {index for index, operand in enumerate(both) if num_products[operand] > 1}
        if not shared or narrow.aval.size >= _FILLS_GPU:
            wide[narrow] = {index for index in shared if both[index] in met}
            met.update(both)
    return wide


def _is_narrow(atom: Any) -> bool:
    return not isinstance(atom, core.Literal) and atom.aval.dtype == _NARROW
