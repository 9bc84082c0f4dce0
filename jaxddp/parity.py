"""Parity of your own training: each strategy ends where one device does, step by step, and PyTorch too if asked.

    def test_parity():
        jaxddp.parity.check(loss_fn, optax.adamw(1e-3), params, batches)

The reference knows no ranks: it differentiates the loss of whole batches, and updates whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from .arguments import check_function, check_integer, check_kind, check_leaves, check_optimizer, is_number
from .checkpoint.host_state import is_key
from .checkpoint.interop import to_numpy, torch_names
from .loss import Weighted, with_key
from .mesh import data_mesh
from .registry import STRATEGIES, make_strategy
from .strategy import Strategy
from .training.train import Trainer
from .training.validation import check_batch
from .tree import check_params, is_floating, merge, named_leaves, split

TORCH = "PyTorch"


class Result(NamedTuple):
    """How far a training was from that on one device.

    Attributes:
        strategy: Its name, or ``"PyTorch"``.
        num_ranks: Of the strategy.
        difference: The largest of any parameter after any step; None if the strategy refused.
        step: The first step after which parameters parted, from 1; None if none did.
        leaf: The first parameter that did.
        refused: Why the strategy took no such training; empty if it did.
        params: What it ended with, by dotted name, the model state as ``model_state.NAME``; ``"PyTorch"`` by its own
            names.
    """

    strategy: str
    num_ranks: int
    difference: float | None
    step: int | None = None
    leaf: str | None = None
    refused: str = ""
    params: Mapping[str, np.ndarray] = MappingProxyType({})


class ParityError(AssertionError):
    """A training that parted from that on one device.

    Attributes:
        results: Of all trainings.
    """

    def __init__(self, results: Sequence[Result], atol: float) -> None:
        """Describes the trainings that parted, in a table."""
        self.results = list(results)
        rows = [("strategy", "ranks", "parted in step", "parameter", "largest difference")]
        rows += [
            (one.strategy, str(one.num_ranks), str(one.step), str(one.leaf), f"{one.difference:.1e}")
            for one in results
            if one.step is not None
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        parted = f"{len(rows) - 1} of {len(results)} trainings differ by more than {atol:g} from one device"
        super().__init__("\n".join([parted, *lines]))


def check(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batches: Iterable[Any],
    *,
    strategies: str | Sequence[str | Strategy] = "all",
    num_ranks: Sequence[int] = (1, 2, 4),
    atol: float = 1e-12,
    dtype: Any = jnp.float64,
    num_microbatches: int = 1,
    max_grad_norm: float | None = None,
    trainable: Callable[[str], bool] | None = None,
    model_state: Any = None,
    torch: tuple[Any, Callable[..., Any], Callable[..., Any]] | None = None,
) -> list[Result]:
    """Trains under each strategy and on one device, and compares all parameters after every step.

    Args:
        loss_fn: ``(params, batch)`` to the mean loss, to ``Weighted``, or to one of these and aux. It takes no key:
            ranks draw other numbers than one device does.
        optimizer: Any optax transformation.
        params: A tree of arrays.
        batches: Global batches, one for each step; trees of arrays.
        strategies: Names or strategies; ``"all"`` takes every one with its defaults, and records those that refuse.
        num_ranks: Of which every strategy is tried; there must be as many devices (``simulate_devices``).
        atol: Largest difference of any element. In float64 1e-12 leaves room for the order of sums alone.
        dtype: To which parameters and batches of floats are cast; theirs if None.
        num_microbatches: As of ``Trainer``, also the next two. One device takes each batch whole.
        max_grad_norm: As of ``Trainer``; one device clips as ``optax.clip_by_global_norm`` does.
        trainable: As of ``Trainer``.
        model_state: Of a ``loss_fn`` that takes and returns one, as for ``Trainer(has_state=True)``: a tree of arrays,
            which are compared as well. Statistics must be those of the whole batch: ``BatchNorm(axis_name="data")``.
        torch: A module with its initial weights at will, its loss ``(module, batch)``, and a function of parameters to
            its optimizer, such as ``partial(torch.optim.AdamW, lr=1e-3)``. It is trained on one process, from the same
            weights, clipped and frozen alike, and its parameters compared by the names of ``checkpoint.interop``.

    Returns:
        A result of each training.

    Raises:
        ParityError: If one parts; it shows the first step and parameter of each.
        ValueError: If there are no batches, one cannot be split over the ranks, there are not as many devices, or a
            named strategy, or every one, refuses such a training.
    """
    check_function("loss_fn", loss_fn)
    check_optimizer(optimizer)
    check_kind("batches", batches, Iterable, "an iterable of batches")
    check_kind("strategies", strategies, (str, Sequence), "names or strategies, or 'all'")
    check_kind("num_ranks", num_ranks, Sequence, "a sequence of numbers of ranks")
    for count in num_ranks:
        check_integer("num_ranks", count)
    check_integer("num_microbatches", num_microbatches)
    if not is_number(atol) or not atol >= 0:
        raise ValueError(f"atol (={atol!r}) must be a number, 0 or more")
    if dtype is not None and not is_floating(dtype):
        raise ValueError(f"dtype (={dtype!r}) must be a floating dtype or None")
    if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm (={max_grad_norm!r}) must be positive or None")
    if trainable is not None:
        check_function("trainable", trainable, "a function of a parameter's name, or None")
    if torch is not None and not (isinstance(torch, tuple) and len(torch) == 3 and all(map(callable, torch))):
        raise ValueError(f"torch (={torch!r}) must be a module, its loss and a function to its optimizer")
    check_params(params, trainable)
    check_leaves("model_state", named_leaves(model_state))
    with jax.enable_x64(jax.config.read("jax_enable_x64") or dtype == jnp.float64):
        params, model_state = _cast(params, dtype), _cast(model_state, dtype)
        batches = [_cast(batch, dtype) for batch in batches]
        if not batches:
            raise ValueError("batches (=[]) must be at least one")
        for count in num_ranks:
            for batch in batches:
                check_batch(batch, count, num_microbatches)
        loss = _Loss(loss_fn, params, model_state, batches[0])
        expected = _on_one_device(loss, optimizer, params, batches, max_grad_norm, trainable)
        options: dict[str, Any] = {
            "num_microbatches": num_microbatches, "max_grad_norm": max_grad_norm, "trainable": trainable,
            "has_aux": loss.has_aux, "has_state": model_state is not None,
        }  # fmt: skip
        is_all = isinstance(strategies, str) and strategies == "all"
        chosen = list(STRATEGIES) if is_all else [strategies] if isinstance(strategies, str) else list(strategies)
        results = []
        for strategy in (make_strategy(one) if isinstance(one, str) else one for one in chosen):
            for count in num_ranks:
                mesh = data_mesh(count)
                try:
                    trainer = Trainer(loss_fn, optimizer, strategy, mesh, **options)
                    trained = _trained(trainer, params, model_state, batches)
                except ValueError as error:
                    if not is_all:
                        raise
                    results.append(Result(strategy.name, count, None, refused=str(error)))
                    continue
                results.append(_compare(strategy.name, count, trained, [_leaves(*one) for one in expected], atol))
        if all(one.refused for one in results) and (results or torch is None):
            raise ValueError(f"no strategy was compared: {results[0].refused if results else 'none was given'}")
        if torch is not None:
            names = dict(zip(torch_names(params), named_leaves(params), strict=True))
            frozen = {theirs for theirs, ours in names.items() if trainable is not None and not trainable(ours)}
            in_torch = _in_torch(*torch, to_numpy(params), batches, frozen, max_grad_norm)
            results.append(_compare(TORCH, 1, in_torch, [to_numpy(one) for one, _ in expected], atol))
    if any(one.step is not None for one in results):
        raise ParityError(results, atol)
    return results


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and is_key(leaf):
            return leaf
        array = np.asarray(leaf)
        return array.astype(dtype) if dtype is not None and jnp.issubdtype(array.dtype, jnp.floating) else array

    return jax.tree.map(cast, tree)


def _leaves(params: Any, model_state: Any) -> dict[str, Any]:
    """What is compared, by name."""
    leaves = named_leaves(params)
    if model_state is not None:
        leaves |= {f"model_state.{name}": leaf for name, leaf in named_leaves(model_state).items() if not is_key(leaf)}
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


class _Loss:
    """A loss function of any kind as one of ``(params, model_state, batch)`` to the mean and the next state."""

    def __init__(self, loss_fn: Callable[..., Any], params: Any, model_state: Any, batch: Any) -> None:
        self.model_state, self._call = model_state, with_key(loss_fn, model_state is not None)
        result = jax.eval_shape(_on_one_rank(self._outputs), params, model_state, batch)
        self.has_aux = isinstance(result, tuple) and not isinstance(result, Weighted)
        if self.has_aux and model_state is not None:  # else it is (loss, new_state)
            self.has_aux = str(jax.tree.structure(result[1])) != str(jax.tree.structure(model_state))

    def _outputs(self, params: Any, model_state: Any, batch: Any) -> Any:
        return self._call(params, *([] if model_state is None else [model_state]), batch, jax.random.key(0))

    def __call__(self, params: Any, model_state: Any, batch: Any) -> tuple[jax.Array, Any]:
        loss = self._outputs(params, model_state, batch)
        if model_state is not None:
            loss, model_state = loss
            model_state = model_state[0] if self.has_aux else model_state
        elif self.has_aux:
            loss = loss[0]
        return loss.total / loss.weight if isinstance(loss, Weighted) else loss, model_state


def _on_one_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Binds the axis of ranks, over which a loss function may average statistics."""
    whole = PartitionSpec()
    return jax.shard_map(function, mesh=data_mesh(1), in_specs=whole, out_specs=whole, check_vma=False)


def _on_one_device(
    loss: _Loss,
    optimizer: Any,
    params: Any,
    batches: Sequence[Any],
    max_grad_norm: float | None,
    trainable: Callable[[str], bool] | None,
) -> list[tuple[Any, Any]]:
    """The parameters and the model state after each step."""
    if max_grad_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(max_grad_norm), optimizer)
    optimizer = optax.with_extra_args_support(optimizer)
    trained, frozen = split(params, trainable)

    def step(trained: Any, model_state: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        grad = jax.value_and_grad(lambda trained: loss(merge(trained, frozen), model_state, batch), has_aux=True)
        (value, model_state), grads = grad(trained)
        updates, opt_state = optimizer.update(grads, opt_state, trained, value=value)
        return optax.apply_updates(trained, updates), model_state, opt_state

    run, after, found = jax.jit(_on_one_rank(step)), [], (trained, loss.model_state, optimizer.init(trained))
    for batch in batches:
        found = jax.block_until_ready(run(*found, batch))
        trained, model_state, _ = found
        after.append((jax.tree.map(np.asarray, merge(trained, frozen)), model_state))
    return after


def _trained(trainer: Trainer, params: Any, model_state: Any, batches: Sequence[Any]) -> list[dict[str, Any]]:
    state, after = trainer.init(params, model_state=model_state), []
    for batch in batches:
        state, _ = trainer.step(state, batch)
        after.append(_leaves(trainer.params(state), None if model_state is None else trainer.model_state(state)))
    return after


def _in_torch(
    module: Any,
    loss_fn: Callable[..., Any],
    make_optimizer: Callable[..., Any],
    weights: Any,
    batches: Sequence[Any],
    frozen: Collection[str],
    max_grad_norm: float | None,
) -> list[dict[str, Any]]:
    import copy

    import torch

    from torchref.clipping import clip_to_norm_, global_norm
    from torchref.interop import from_numpy, to_numpy
    from torchref.loss import as_part

    dtype = torch.from_numpy(next(iter(weights.values()))).dtype
    module = copy.deepcopy(module).to(dtype)
    buffers = {name: tensor for name, tensor in module.named_buffers() if name in module.state_dict()}
    module = from_numpy(buffers | weights, module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    optimizer, after = make_optimizer(module.parameters()), []
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for batch in batches:
        optimizer.zero_grad()
        part = as_part(loss_fn(module, jax.tree.map(torch.from_numpy, batch)))
        (part.total if part.weight is None else part.total / part.weight).backward()
        for parameter in trained:  # jaxddp's gradient of an unused one is 0
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if max_grad_norm is not None:  # torch's own clipping adds 1e-6 to the norm
            grads = [parameter.grad for parameter in trained if parameter.grad is not None]
            clip_to_norm_(grads, global_norm(grads), max_grad_norm)
        optimizer.step()
        after.append(to_numpy(module))
    return after


def _compare(name: str, num_ranks: int, trained: Sequence[Any], expected: Sequence[Any], atol: float) -> Result:
    parted: tuple[int | None, str | None] = (None, None)
    largest = 0.0
    for step, (found, right) in enumerate(zip(trained, expected, strict=True), 1):
        for leaf, array in right.items():
            apart = np.abs(np.asarray(found[leaf], np.float64) - np.asarray(array, np.float64))
            difference = float(np.max(apart, initial=0.0))
            largest = float(np.maximum(largest, difference))  # NaN stays
            if not difference <= atol and parted[0] is None:
                parted = step, leaf
    return Result(name, num_ranks, largest, *parted, params=trained[-1])
