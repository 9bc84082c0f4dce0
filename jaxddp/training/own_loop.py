"""For a loop of one's own, inside ``jax.shard_map``: mean gradients as planned, and a ``jit`` that keeps the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..arguments import check_axis, check_flag, check_function, check_kind
from ..communication.collectives import axis_size, broadcast
from ..communication.compression import check_stateless
from ..communication.varying import as_varying, varying
from ..loss import denominator, divide, partial_loss, refuse_derivative
from ..strategy import Strategy, plan_trace, sync_gradients, trace_gradients
from ..tree import split
from .step import RankStep
from .xla import compile_options

_DIFFERENTIATED = (
    "results of value_and_grad must not be differentiated in a jax.shard_map with check_vma=False, where ranks would"
    " get derivatives of their own: leave check_vma on"
)


def value_and_grad(
    loss_fn: Callable[..., Any], strategy: Strategy, axis: str = "data", *, has_aux: bool = False
) -> Callable[..., Any]:
    """Gives the loss and its gradient, averaged over the ranks of an axis.

    Call the function inside ``jax.shard_map``, with ``check_vma`` or without, and compile with ``jaxddp.jit``: XLA
    merges the collectives otherwise. Nothing is summed over other axes of the mesh but what autodiff sums. Gradients
    that are zero whatever the batch is, as of an unused parameter, are not sent; all others are.

    ======== ============================= ========================================
    tensor   on each rank of the axis      returned, equal on all ranks of the axis
    ======== ============================= ========================================
    params   ``[shape]``, equal on all     gradient ``[shape]``
    batch    ``[n, ...]``, its own         loss ``[]``
    ======== ============================= ========================================

    Args:
        loss_fn: ``(params, batch, ...)`` to the mean loss over this rank's examples, or to ``Weighted``; with
            ``has_aux`` to ``(loss, aux)``. Give it a key that differs by rank to draw noise that does.
        strategy: One that does not shard: ``naive``, ``flat``, ``overlapped`` or ``bucketed``.
        axis: Name of the mesh axis.
        has_aux: Whether the loss function returns auxiliary values, of the kinds that ``Trainer`` takes.

    Returns:
        ``(params, batch, ...) -> (loss, gradients)``, with ``has_aux`` ``((loss, aux), gradients)``; further arguments
        are the loss function's.

    Raises:
        ValueError: If the strategy shards, or its compression has state; where the function is called, if the axis is
            not bound, the loss is not a scalar, or the results are differentiated again without ``check_vma``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> import jaxddp
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> strategy = jaxddp.bucketed(25)
        >>> def step(params, batch):
        ...     loss, grads = jaxddp.value_and_grad(loss_fn, strategy)(params, batch)
        ...     return loss, jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)
        >>> specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        >>> run = jaxddp.jit(jax.shard_map(step, mesh=jaxddp.data_mesh(4), **specs), strategy)
        >>> loss, params = run({"w": jnp.zeros((3, 1))}, {"x": jnp.ones((8, 3)), "y": jnp.ones((8, 1))})
        >>> float(loss)
        1.0
    """
    check_function("loss_fn", loss_fn)
    check_kind("strategy", strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
    check_axis(axis)
    check_flag(has_aux=has_aux)
    check_stateless(strategy.compression, "in value_and_grad: use a Trainer, which carries its state from step to step")
    if strategy.shards_optimizer_state:
        raise ValueError(
            f"strategy (={strategy.name!r}) must not shard in value_and_grad: use a Trainer, or give the gradients of"
            " jax.grad, which are this rank's, to jaxddp.shard_optimizer(optimizer, axis)"
        )

    def on_rank(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        num_ranks = axis_size(axis)

        def loss(params: Any, batch: Any) -> Any:
            return loss_fn(params, batch, *args, **kwargs)

        loss.__name__ = getattr(loss_fn, "__name__", repr(loss_fn))
        partial = partial_loss(loss, has_aux)

        def local_loss(*args: Any) -> Any:
            total, others = partial(*args)
            # A mean that the loss took over ranks counts on each of them, as it does where check_vma is off.
            return as_varying(total, axis), others

        step = RankStep(
            local_loss, optax.with_extra_args_support(optax.identity()), strategy, axis, num_ranks,
            num_microbatches=1, trainable=None, max_grad_norm=None, grad_dtype=None,
        )  # fmt: skip

        def local_grads(params: Any, batch: Any) -> Any:
            # Of parameters that vary over ranks, gradients are local. Of equal ones, autodiff would sum them.
            return step.local_grads(*split(as_varying(params, axis), None), (), batch, None)

        # A constant may still be another one on each process, which no trainer has compared here: it is sent.
        trace = trace_gradients(local_grads, params, batch, has_aux=True).with_constants_sent()
        plan = plan_trace(strategy, trace)
        plan = plan if num_ranks > 1 else replace(plan, buckets=())
        local, (parts, _) = local_grads(params, batch)
        parts = step.sum_parts(parts)
        value, aux = divide(parts, num_ranks)
        grads = sync_gradients(
            local, plan, axis, denominator=denominator(parts.loss, num_ranks), compression=strategy.compression
        )
        result = (value, aux) if has_aux else value, grads
        if not varying(lax.axis_index(axis)):
            # Without check_vma, the derivative of a sum over ranks is that of one rank.
            result = jax.tree.map(
                lambda leaf: refuse_derivative(leaf, _DIFFERENTIATED) if jnp.issubdtype(leaf, jnp.inexact) else leaf,
                result,
            )
        if num_ranks > 1:
            return result
        # Nothing was sent; check_vma takes only the result of a collective as equal on all ranks.
        return jax.tree.map(lambda leaf: broadcast(leaf, axis) if axis in varying(leaf) else leaf, result)

    return on_rank


def jit(
    function: Callable[..., Any],
    strategy: Strategy,
    *,
    platform: str | None = None,
    start_early: bool = True,
    **options: Any,
) -> Any:
    """Compiles as ``jax.jit`` does, with the options that keep the plan of a strategy.

    Args:
        function: Around ``jax.shard_map``.
        strategy: Whose plan it carries out.
        platform: Of the devices, as for ``compile_options``; that of JAX's default device if None.
        start_early: As for ``compile_options``.
        **options: Those of ``jax.jit``; ``compiler_options`` are added to the strategy's.

    Returns:
        What ``jax.jit`` returns.

    Raises:
        ValueError: If the strategy is none, or the platform is unknown.
    """
    check_function("function", function)
    check_kind("strategy", strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
    platform = jax.default_backend() if platform is None else platform
    compiler_options = compile_options(strategy, platform, start_early=start_early)
    compiler_options |= options.pop("compiler_options", None) or {}
    return jax.jit(function, compiler_options=compiler_options, **options)
