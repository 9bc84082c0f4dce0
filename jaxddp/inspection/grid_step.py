"""A training step of the feed-forward model over a grid of devices, FSDP x TP, as plain ``jit`` with shardings.

Nothing here communicates by itself. Arrays say how they lie over the axes ``fsdp`` (X) and ``tp`` (Y), and XLA's
partitioner puts in the collectives:

    array                     lies as                      in use, one block at a time
    ------------------------  ---------------------------  ------------------------------------------
    gate, up    [L, D, F]     [L, D / X, F / Y]            gathered over fsdp, as they travel: [D, F / Y]
    down        [L, F, D]     [L, F / Y, D / X]            likewise: [F / Y, D]
    batch       [K, B/K, D]   [K, B / (K X), D]            its products with up are cut by tp, those with down summed

Blocks are rounds of a scan, so that any number of them compiles in the time of one. What the backward needs are the
inputs of the blocks and the results of their first products; parameters are gathered again. The optimizer works on
shards.

References:
    Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs, 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import targets
from ..scopes import METRICS_SCOPE, OPTIMIZER_SCOPE
from ..targets.compile import start_compile_for_target
from ..targets.job import Pending
from ..training.step import TrainState

_FSDP, _TP = "fsdp", "tp"
_SPECS = {
    "gate": PartitionSpec(None, _FSDP, _TP),
    "up": PartitionSpec(None, _FSDP, _TP),
    "down": PartitionSpec(None, _TP, _FSDP),
}
_KEPT = "jaxddp.kept"


def block(weights: Any, x: jax.Array, keep: Callable[[jax.Array], jax.Array] = lambda product: product) -> jax.Array:
    """One block of the feed-forward model: ``x up down``, or gated ``(silu(x gate) * x up) down``.

    Args:
        weights: ``up [D, F]``, ``down [F, D]`` and perhaps ``gate [D, F]``.
        x: ``[tokens, D]``.
        keep: Applied to the results of the first products.

    Returns:
        ``[tokens, D]``.
    """
    wide = {name: keep(x @ weight) for name, weight in weights.items() if name != "down"}
    return (jax.nn.silu(wide["gate"]) * wide["up"] if "gate" in wide else wide["up"]) @ weights["down"]


def mean_square(y: jax.Array) -> jax.Array:
    """A loss of any model: the mean over tokens of the squared output, in float32."""
    with jax.named_scope(METRICS_SCOPE):
        return jnp.mean(jnp.square(y.astype(jnp.float32)))


def start_grid_step(
    target: targets.Target,
    params: dict[str, jax.ShapeDtypeStruct],
    batch: jax.ShapeDtypeStruct,
    optimizer: optax.GradientTransformation,
    *,
    fsdp: int,
    tp: int,
) -> tuple[TrainState, Pending]:
    """Starts to compile the step.

    Args:
        target: Of ``fsdp x tp`` devices.
        params: The model: stacks ``up [L, D, F]``, ``down [L, F, D]`` and perhaps ``gate [L, D, F]``, in the dtype in
            which they are updated.
        batch: ``[K, B / K, D]``, in the dtype in which parameters travel and products are made.
        optimizer: Whose state mirrors the parameters.
        fsdp: X.
        tp: Y.

    Returns:
        The state that the program takes, which has no step and no key, and what gives the program.

    Raises:
        ValueError: If the sizes cannot be divided, or the target's compiler is missing.
    """
    _, width, hidden = params["up"].shape
    for name, size, ranks, count in (("width", width, "fsdp", fsdp), ("hidden", hidden, "tp", tp)):
        if size % count:
            raise ValueError(f"{name} (={size}) must be divisible by {ranks} (={count})")
    mesh = AbstractMesh(
        (fsdp, tp), (_FSDP, _TP), axis_types=(AxisType.Auto,) * 2,
        abstract_device=targets.mesh(target.spec).abstract_device,
    )  # fmt: skip
    empty: Any = ()
    state = TrainState(empty, params, jax.eval_shape(optimizer.init, params), empty)
    lies = jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, _spec(path)), state)
    pending = start_compile_for_target(
        target, _step(mesh, optimizer), (state, batch),
        in_shardings=(lies, NamedSharding(mesh, PartitionSpec(None, _FSDP))),
        out_shardings=(lies, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=(0,),
    )  # fmt: skip
    return state, pending


def _spec(path: Any) -> PartitionSpec:
    """How a leaf lies: as the parameter whose name its path ends with; whole if it is of none."""
    return _SPECS.get(getattr(path[-1], "key", ""), PartitionSpec())


def _step(mesh: AbstractMesh, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def place(array: jax.Array, *axes: str | None) -> jax.Array:
        return lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*axes)))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def one(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            # Cast before they are gathered: this is what travels.
            whole = {
                name: place(weight.astype(x.dtype), *(axis if axis == _TP else None for axis in _SPECS[name][1:]))
                for name, weight in weights.items()
            }
            y = block(whole, x, lambda product: checkpoint_name(place(product, _FSDP, _TP), _KEPT))
            return place(y, _FSDP, None), None

        policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
        return mean_square(lax.scan(jax.checkpoint(one, policy=policy), x, params)[0])

    def grads_of(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return loss, {name: place(grad, *_SPECS[name]) for name, grad in grads.items()}

    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = grads_of(state.params, batch[0])
        if len(batch) > 1:

            def add(total: Any, x: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, grads_of(state.params, x)), None

            (loss, grads), _ = lax.scan(add, (loss, grads), batch[1:])
        with jax.named_scope(OPTIMIZER_SCOPE):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), loss

    return step
