"""Where a model in JAX and one in PyTorch part: the first module whose output, or its gradient, is another one.

Both run once on the same batch, in float64 and then in the user's dtype, with the weights that each has: one that was
carried over wrong may be what is looked for. Outputs of PyTorch's submodules are compared with those of Flax modules of
the same name, Linen's or NNX's, and with what is marked.
"""

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from ..table import table
from .step import cast, difference, wide_enough

_EXACT = 1e-9  # in float64: the order of sums, through a few hundred layers
# Of the user's dtype: units in the last place, at most a share; or so many times PyTorch's own distance from float64.
_ROUNDED, _MOST_ROUNDED, _OF_TORCHS = 1e3, 0.05, 10.0


class Compared(NamedTuple):
    """One output of a module, or the gradient of the loss by it, in both frameworks."""

    name: str  # of the module in PyTorch; its second output in a step is NAME#2
    kind: str  # its class
    is_backward: bool  # whether it is the gradient
    in_float64: float  # largest difference of an element, relative to the largest element; infinite for other shapes
    in_dtype: float
    is_apart: bool  # by more than rounding in either

    def __str__(self) -> str:
        where = "gradient of the output" if self.is_backward else "output"
        return f"{where} of {self.name or 'the model'} ({self.kind}): {self.in_float64:.1e} in float64"


@dataclass(frozen=True)
class Comparison:
    """All that could be compared; printed, it is a table."""

    compared: tuple[Compared, ...]  # outputs in the order of PyTorch's forward, then gradients in that of its backward
    dtype: str  # the user's
    only_in_torch: tuple[str, ...]  # modules without a counterpart of their name, or whose output is no floating tensor
    only_in_jax: tuple[str, ...]  # likewise, without a counterpart

    @property
    def first(self) -> Compared | None:
        """The first that is apart; None if nothing is."""
        return next((one for one in self.compared if one.is_apart), None)

    def __str__(self) -> str:
        rows = [
            (one.name or "(the model)", one.kind, "backward" if one.is_backward else "forward",
             f"{one.in_float64:.1e}", f"{one.in_dtype:.1e}", "APART" if one.is_apart else "ok")
            for one in self.compared
        ]  # fmt: skip
        heads = ("module", "class", "pass", "float64", self.dtype, "check")
        in_torch = ", ".join(name or "(the model)" for name in self.only_in_torch)
        below = {"first apart": self.first, "only in PyTorch": in_torch, "only in JAX": ", ".join(self.only_in_jax)}
        lines = [f"{what}: {found}" for what, found in below.items() if found]
        return "\n".join([table(heads, rows, left=("class", "pass", "check")), *lines])


def mark(name: str, value: jax.Array) -> jax.Array:
    """Gives a value to ``first_difference`` under the name of a module of PyTorch's; elsewhere it does nothing."""
    return _record.get()(name, value)


def first_difference(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    module: Any,
    torch_loss: Callable[[Any, Any], Any],
    *,
    names: Mapping[str, str] | None = None,
    dtype: Any = jnp.float32,
) -> Comparison:
    """Compares a model in JAX and one in PyTorch, module by module, forward and backward.

    Args:
        loss_fn: ``(params, batch)`` to a scalar, run without ``jit``; in a scan, each round is a call.
        params: A tree of arrays.
        batch: A tree of arrays; PyTorch gets tensors.
        module: An ``nn.Module``, with its weights; it is copied.
        torch_loss: ``(module, batch)`` to a scalar.
        names: PyTorch's name of a module to that in JAX, where they differ in more than ``layers.0`` and ``layers_0``.
        dtype: The user's, which is compared after float64.

    Raises a ValueError if no module has a counterpart, or one lies within ``jax.checkpoint`` or ``jax.vmap``.
    """

    def in_jax(name: str) -> str:
        return _canonical((names or {}).get(name, name))

    in_dtype = jnp.dtype(dtype).name
    ours, ours_rounded = (_in_jax(loss_fn, params, batch, one) for one in ("float64", in_dtype))
    (theirs, kinds), (rounded, _) = (_in_torch(module, torch_loss, batch, one) for one in ("float64", in_dtype))
    least = min(_ROUNDED * float(jnp.finfo(dtype).eps), _MOST_ROUNDED)
    compared = []
    for (name, is_backward), right in theirs.items():
        key, place = (name, is_backward), (in_jax(name), is_backward)
        if place in ours:
            exact, inexact = _apart(ours[place], right), _apart(ours_rounded[place], rounded[key])
            limit = max(least, min(1.0, _OF_TORCHS * difference(rounded[key], right, 0.0)))
            is_apart = not (exact <= _EXACT and inexact <= limit)
            compared.append(Compared(name, kinds[name], is_backward, exact, inexact, is_apart))
    matched = {in_jax(one.name) for one in compared}
    only_in_torch = tuple(name for name in kinds if in_jax(name) not in matched)
    only_in_jax = tuple(name for name, is_backward in ours if not is_backward and name not in matched)
    if not compared:
        some = f"PyTorch has {only_in_torch[:5]}, and JAX {only_in_jax[:5]}"
        raise ValueError(f"no module has a counterpart, or mark, of its name: {some}; give names=")
    return Comparison(tuple(compared), in_dtype, only_in_torch, only_in_jax)


def _apart(found: np.ndarray, right: np.ndarray) -> float:
    """How far a value in JAX is from PyTorch's; of images, channels come last in Flax."""
    layouts = (found, found.transpose(0, 3, 1, 2)) if found.ndim == 4 else (found,)
    return min(difference(layout, right, 0.0) for layout in layouts)


# By name and whether it is a gradient: outputs in the order of the forward, then gradients by them.
Values = dict[tuple[str, bool], np.ndarray]

_record: ContextVar[Callable[[str, jax.Array], jax.Array]] = ContextVar("marks", default=lambda name, value: value)


def _in_jax(loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any, dtype: str) -> Values:
    with wide_enough(jnp.dtype(dtype)), jax.disable_jit():
        params, batch = jax.tree.map(jnp.asarray, cast((params, batch), dtype))

        def recorded(zeros: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            """The loss and what was marked, each with a zero added, by which the loss can be differentiated."""
            values: dict[str, jax.Array] = {}

            def record(name: str, value: jax.Array) -> jax.Array:
                if not jnp.issubdtype(value.dtype, jnp.inexact):  # masks and routes, which have no gradient
                    return value
                name = _numbered(_canonical(name), values)
                values[name] = value + zeros.get(name, 0)
                return values[name]

            token = _record.set(record)
            try:
                with _marked_modules():
                    return loss_fn(params, batch), values
            finally:
                _record.reset(token)

        marked = recorded({})[1]
        if within := [name for name, value in marked.items() if isinstance(value, jax.core.Tracer)]:
            raise ValueError(f"modules and marks (={within}) must not lie within jax.checkpoint or jax.vmap")
        grads, values = jax.grad(recorded, has_aux=True)(jax.tree.map(jnp.zeros_like, marked))
        named = [((name, tree is grads), one) for tree in (values, grads) for name, one in tree.items()]
        return {key: np.asarray(one, np.float64) for key, one in named}


@contextlib.contextmanager
def _marked_modules() -> Iterator[None]:
    """Marks what Flax modules return: Linen's by their paths, NNX's by where the outermost that is called has them."""
    running: list[int] = []  # modules, by id
    names: dict[int, str] = {}  # of NNX modules, by id

    def marked(module: Any, name: str | None, call: Any, *args: Any, **kwargs: Any) -> Any:
        if name is None or id(module) in running:  # of super().__call__ nothing is marked
            return call(*args, **kwargs)
        running.append(id(module))
        try:
            result = call(*args, **kwargs)
        finally:
            running.pop()
        return mark(name, result) if isinstance(result, jax.Array) else result

    def of_linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        name = ".".join(context.module.path) if context.method_name == "__call__" else None
        return marked(context.module, name, call, *args, **kwargs)

    def of_nnx(self: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        if not running:
            names.clear()
            names.update({id(node): ".".join(map(str, path)) for path, node in nnx.iter_graph(self)})
        return marked(self, names.get(id(self)), partial(call, self), *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(linen.intercept_methods(of_linen))
        for kind in _subclasses(nnx.Module):
            if "__call__" in vars(kind):
                stack.enter_context(patch.object(kind, "__call__", partialmethod(of_nnx, vars(kind)["__call__"])))
        yield


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _in_torch(module: Any, loss_fn: Callable[[Any, Any], Any], batch: Any, dtype: str) -> tuple[Values, dict[str, str]]:
    """What the modules give, and their classes by name."""
    import torch

    module = copy.deepcopy(module).to(getattr(torch, dtype))
    values: Values = {}
    grads: Values = {}
    kinds: dict[str, str] = {}

    def keep(path: str, called: Any, inputs: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):  # listed among those that are not compared
            kinds.update({path: type(called).__name__} if path else {})
            return
        name = _numbered(path, [name for name, _ in values])
        kinds[name] = type(called).__name__
        # A copy: what comes next may work in place.
        values[name, False] = output.detach().to(torch.float64, copy=True).numpy()
        if output.requires_grad:
            output.register_hook(lambda grad: grads.update({(name, True): grad.to(torch.float64, copy=True).numpy()}))

    for path, one in module.named_modules():
        one.register_forward_hook(partial(keep, path))

    def tensor(leaf: Any) -> Any:
        found = torch.from_numpy(np.array(leaf))
        return found.to(getattr(torch, dtype)) if found.is_floating_point() else found

    # By way of float64, since NumPy has no bfloat16.
    loss_fn(module, jax.tree.map(tensor, cast(batch, "float64"))).backward()
    return values | grads, kinds


def _numbered(name: str, taken: Iterable[str]) -> str:
    """The name, or the name of its next call."""
    count = sum(1 for one in taken if one.partition("#")[0] == name)
    return f"{name}#{count + 1}" if count else name


def _canonical(name: str) -> str:
    return re.sub(r"_(\d+)(?=\.|#|$)", r".\1", name)
