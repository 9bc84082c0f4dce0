"""Where a model in JAX and one in PyTorch part: the first module whose output, or its gradient, is another one.

    found = jaxddp.parity.first_difference(loss_fn, params, batch, module, torch_loss)
    print(found)            # a row for each module, forward and backward
    print(found.first)      # the first that is apart

Both run once on the same batch in float64, with the weights that each has: one that was carried over wrong may be what
is looked for. Outputs of PyTorch's submodules are compared with those of Linen's of the same name, and with what is
marked: ``x = jaxddp.parity.mark("layers.0.attention", x)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import check_function
from .step_parity import difference
from .table import table

_ROUNDING = 1e-9  # in float64: the order of sums, through a few hundred layers


class Compared(NamedTuple):
    """One output of a module, or the gradient of the loss by it, in both frameworks."""

    name: str  # of the module in PyTorch; its second output in a step is NAME#2
    kind: str  # its class
    is_backward: bool  # whether it is the gradient
    difference: float  # largest of an element, relative to the largest element; infinite for other shapes

    @property
    def is_apart(self) -> bool:
        """Whether it is more than rounding."""
        return not self.difference <= _ROUNDING


@dataclass(frozen=True)
class Comparison:
    """All that could be compared; printed, it is a table."""

    compared: tuple[Compared, ...]  # outputs in the order of PyTorch's forward, then gradients in that of its backward
    missing: tuple[str, ...]  # modules of PyTorch without a counterpart of their name, or whose output is no tensor

    @property
    def first(self) -> Compared | None:
        """The first that is apart; None if nothing is."""
        return next((one for one in self.compared if one.is_apart), None)

    def __str__(self) -> str:
        rows = [
            (one.name or "(the model)", one.kind, "backward" if one.is_backward else "forward",
             f"{one.difference:.1e}", "APART" if one.is_apart else "ok")
            for one in self.compared
        ]  # fmt: skip
        shown = table(("module", "class", "pass", "difference", "check"), rows, left=("class", "pass", "check"))
        return f"{shown}\nnot compared: {', '.join(self.missing) or 'nothing'}"


def mark(name: str, value: jax.Array) -> jax.Array:
    """Gives a value to ``first_difference`` under the name of a module of PyTorch's; elsewhere it does nothing."""
    if (record := _record.get()) is None:
        return value
    values, zeros = record
    name = _numbered(name, values)
    values[name] = value = value if zeros is None else value + zeros[name]
    return value


def first_difference(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    module: Any,
    torch_loss: Callable[[Any, Any], Any],
    *,
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Compares a model in JAX and one in PyTorch, module by module, forward and backward.

    Args:
        loss_fn: ``(params, batch)`` to a scalar. It runs outside of ``jit``; what is marked must not lie within
            ``jax.checkpoint``.
        params: A tree of arrays.
        batch: A tree of arrays; PyTorch gets tensors.
        module: An ``nn.Module``, with its weights; it is copied.
        torch_loss: ``(module, batch)`` to a scalar.
        names: PyTorch's name of a module to that in JAX, where they differ in more than ``layers.0`` and ``layers_0``.

    Returns:
        The comparison.

    Raises:
        ValueError: If no module has a counterpart.
    """
    check_function("loss_fn", loss_fn)
    check_function("torch_loss", torch_loss)
    names = names or {}
    ours, (*theirs, kinds) = _in_jax(loss_fn, params, batch), _in_torch(module, torch_loss, batch)
    compared = []
    for is_backward, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
        by_name = {_canonical(name): value for name, value in mine.items()}
        for name, value in right.items():
            if (found := by_name.get(_canonical(names.get(name, name)))) is not None:
                if found.ndim == 4 and found.shape != value.shape:
                    found = found.transpose(0, 3, 1, 2)  # images: channels come last in Flax
                apart = difference(found, value, least=0)
                compared.append(Compared(name, kinds[name], bool(is_backward), apart))
    missing = tuple(name for name in kinds if name not in {one.name for one in compared})
    if not compared:
        known = ", ".join(ours[0]) or "nothing that is a Linen module or marked"
        raise ValueError(f"no module has a counterpart: PyTorch has {', '.join(missing[:5])}, and JAX {known:.100}")
    return Comparison(tuple(compared), missing)


# While a loss is compared: values by name, and for each a zero that is added, by which the loss can be differentiated.
_record: ContextVar[tuple[dict[str, jax.Array], Mapping[str, jax.Array] | None] | None] = ContextVar(
    "jaxddp_marks", default=None
)


def _in_jax(loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> list[dict[str, np.ndarray]]:
    """Outputs by name in the order of the forward, and gradients by them."""
    import flax.linen as nn

    def interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        is_output = context.method_name == "__call__" and isinstance(result, jax.Array)
        return mark(".".join(context.module.path), result) if is_output else result

    def recorded(zeros: Mapping[str, jax.Array] | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        values: dict[str, jax.Array] = {}
        token = _record.set((values, zeros))
        try:
            with nn.intercept_methods(interceptor):
                return loss_fn(params, batch), values
        finally:
            _record.reset(token)

    def wide(leaf: Any) -> jax.Array:
        array = jnp.asarray(leaf)
        return array.astype(jnp.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array

    with jax.enable_x64(True), jax.disable_jit():
        params, batch = jax.tree.map(wide, (params, batch))
        zeros = jax.tree.map(jnp.zeros_like, recorded(None)[1])
        grads, values = jax.grad(recorded, has_aux=True)(zeros)
        return [{name: np.asarray(one) for name, one in tree.items()} for tree in (values, grads)]


def _in_torch(module: Any, loss_fn: Callable[[Any, Any], Any], batch: Any) -> tuple[dict[str, Any], ...]:
    """The same, and classes by name."""
    import copy

    import torch

    module = copy.deepcopy(module).double()
    values: dict[str, np.ndarray] = {}
    grads: dict[str, np.ndarray] = {}
    kinds: dict[str, str] = {}

    def hook(path: str) -> Callable[..., None]:
        def keep(called: Any, inputs: Any, output: Any) -> None:
            name = _numbered(path, values)
            kinds[name] = type(called).__name__
            if isinstance(output, torch.Tensor):
                values[name] = output.detach().double().numpy()
                if output.requires_grad:
                    output.register_hook(lambda grad: grads.update({name: grad.double().numpy()}))

        return keep

    for path, one in module.named_modules():
        one.register_forward_hook(hook(path))

    def tensor(leaf: Any) -> Any:
        array = np.array(leaf)
        return torch.from_numpy(array.astype(np.float64) if array.dtype.kind == "f" else array)

    loss_fn(module, jax.tree.map(tensor, batch)).backward()
    return values, grads, kinds


def _numbered(name: str, taken: Mapping[str, Any]) -> str:
    """The name, or the name of its next call."""
    count = sum(1 for one in taken if one.partition("#")[0] == name)
    return f"{name}#{count + 1}" if count else name


def _canonical(name: str) -> str:
    return re.sub(r"_(\d+)(?=\.|#|$)", r".\1", name)
