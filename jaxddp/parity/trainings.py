"""Parity of your own training: each strategy ends where one device does, step by step, and PyTorch too if asked.

The reference knows no ranks: it differentiates the loss of whole batches, and updates whole parameters. After every
step parameters, optimizer state, model state, loss, gradient norm and aux values are compared with it, and the copies
of each rank with each other.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from ..checkpoint.host_state import to_host
from ..checkpoint.interop import to_numpy
from ..loss import Weighted, divide, partial_loss, with_key
from ..mesh import data_mesh
from ..registry import STRATEGIES, make_strategy
from ..strategy import Strategy
from ..training.programs import no_mesh
from ..training.train import Trainer, TrainState
from ..tree import check_params, like, merge, named_leaves, split
from .step import COPIES, cast, difference, on_host, wide_enough


class Result(NamedTuple):
    """How far a training was from that on one device."""

    strategy: str  # its name, or "PyTorch"
    num_ranks: int  # of the strategy
    difference: float | None  # the largest after any step; infinite if copies differ; None if the strategy refused
    step: int | None = None  # the first step after which anything parted, from 1; None if nothing did
    leaf: str | None = None  # the first that did: of parameters, opt_state, model_state, metrics, or copies of one
    refused: str = ""  # why the strategy took no such training; empty if it did
    params: Mapping[str, np.ndarray] = MappingProxyType({})  # what it ended with, by name, with the model state

    def __repr__(self) -> str:
        where = "" if self.step is None else f", first in step {self.step} at {self.leaf}"
        said = f"refused, {self.refused}" if self.difference is None else f"{self.difference:.1e} apart{where}"
        return f"<{self.strategy} on {self.num_ranks}: {said}>"


class ParityError(AssertionError):
    """Trainings that parted from that on one device; ``results`` are of all trainings."""

    def __init__(self, results: Sequence[Result], atol: float) -> None:
        self.results = list(results)
        parted = [str(one) for one in results if one.step is not None]
        said = f"{len(parted)} of {len(results)} trainings differ by more than {atol:g} from one device"
        super().__init__("\n".join([said, *parted]))


def check(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batches: Iterable[Any],
    *,
    strategies: str | Sequence[str | Strategy] = "all",
    num_ranks: int | Sequence[int] = (1, 2, 4),
    atol: float = 1e-12,  # in float64 room for the order of sums alone
    dtype: Any = jnp.float64,
    num_microbatches: int = 1,
    max_grad_norm: float | None = None,
    trainable: Callable[[str], bool] | None = None,
    model_state: Any = None,
    torch: tuple[Any, Callable[..., Any], Callable[..., Any]] | None = None,
) -> list[Result]:
    """Trains under each strategy and on one device, and compares everything after every step.

    Args:
        loss_fn: As of ``Trainer``, without a key; aux of a batch must be that of its parts together.
        optimizer: Any optax transformation.
        params: A tree of arrays.
        batches: Global batches, one for each step, at least two; trees of arrays.
        strategies: Strategies, or names: of these, parameters fill several buckets, and some are sharded. ``"all"``
            takes every one, and records those that refuse the optimizer.
        num_ranks: Of which every strategy is tried, each with a device (``simulate_devices``).
        atol: Largest difference of any element, of leaves with elements above 1 relative to the largest.
        dtype: To which floats are cast, complex ones alike; theirs if None.
        num_microbatches: As of ``Trainer``, as are the next two. One device takes each batch whole.
        max_grad_norm: One device clips as ``optax.clip_by_global_norm`` does.
        trainable: Predicate on a parameter's name.
        model_state: As of ``Trainer.init``; its statistics must be those of the whole batch.
        torch: A module, its loss ``(module, batch)``, and a function of parameters to its optimizer, such as
            ``partial(torch.optim.AdamW, lr=1e-3)``; trained on one process from the same weights.

    Raises a ParityError, with the first step and leaf of each training that parts; a ValueError if a batch cannot be
    split over the ranks, nothing moves, or a named strategy refuses.
    """
    options = {"num_microbatches": num_microbatches, "max_grad_norm": max_grad_norm, "trainable": trainable}
    with wide_enough(dtype), no_mesh():
        task = Task(loss_fn, optimizer, params, model_state, batches, dtype, options)
        expected = on_one_device(task)
        results = under_strategies(task, strategies, num_ranks, expected, atol)
        if torch is not None:
            results.append(_under_torch(task, torch, expected, atol))
    if not results:  # or nothing would have been compared
        raise ValueError("strategies must name at least one")
    if any(one.step is not None for one in results):
        raise ParityError(results, atol)
    return results


class Task:
    """A training, however it is done."""

    def __init__(self, loss_fn: Any, optimizer: Any, params: Any, model_state: Any, batches: Any, dtype: Any,
                 options: dict[str, Any]) -> None:  # fmt: skip
        self.params, self.model_state, self.batches = (cast(tree, dtype) for tree in (params, model_state, [*batches]))
        if (count := len(self.batches)) < 2:
            raise ValueError(f"batches (={count}) must be two or more: lost optimizer state shows in the second")
        check_params(self.params, options["trainable"])
        states = [] if model_state is None else [self.model_state]
        outputs = _on_one_rank(partial(with_key(loss_fn, bool(states)), key=jax.random.key(0)), mesh=data_mesh(1))
        result = jax.eval_shape(outputs, self.params, *states, self.batches[0])
        has_aux = isinstance(result, tuple) and not isinstance(result, Weighted)
        if has_aux and states:  # else it is (loss, new_state)
            has_aux = str(jax.tree.structure(result[1])) != str(jax.tree.structure(model_state))
        options = {"has_aux": has_aux, "has_state": bool(states), **options}
        self.trainer = Trainer(loss_fn, optimizer, make_strategy("flat"), data_mesh(1), **options)


def under_strategies(
    task: Task, strategies: Any, num_ranks: int | Sequence[int], expected: Sequence[Any], atol: float
) -> list[Result]:
    """Trains under each strategy on each number of ranks, and compares with what ``on_one_device`` gave."""
    chosen = [strategies] if isinstance(strategies, str) else strategies
    is_all, results, trained = chosen == ["all"], [], split(task.params, task.trainer.trainable)[0]
    for one in STRATEGIES if is_all else chosen:
        strategy = _in_several_parts(one, trained) if isinstance(one, str) else one
        for count in np.atleast_1d(num_ranks):
            trainer = task.trainer.with_strategy(strategy, data_mesh(count))
            try:
                state = trainer.init(task.params, model_state=task.model_state)
            except ValueError as error:
                shards = strategy.gathers_in_loss or strategy.plan(()).kind != "all-reduce"
                if not is_all or not shards:  # those that do not shard take every optimizer
                    raise
                results.append(Result(strategy.name, count, None, refused=str(error)))
            else:
                results.append(_compare(strategy.name, count, _trained(trainer, state, task.batches), expected, atol))
    return results


def _under_torch(task: Task, given: tuple[Any, Any, Any], expected: Sequence[Any], atol: float) -> Result:
    import torch

    import torchref
    from torchref import interop

    weights = to_numpy(task.params)
    ours = dict(zip(weights, named_leaves(task.params), strict=True))  # by PyTorch's names
    module, loss_fn, make_optimizer = copy.deepcopy(given[0]), *given[1:]
    module.to(torch.from_numpy(next(iter(weights.values()))).dtype)
    buffers = {name: tensor for name, tensor in module.named_buffers() if name in module.state_dict()}
    interop.from_numpy(buffers | weights, module)
    is_trained = task.trainer.trainable or (lambda name: True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and is_trained(ours[name]))
    optimizer, found = make_optimizer(module.parameters()), []
    trainer = torchref.Trainer(loss_fn, optimizer, module, max_grad_norm=task.trainer.max_grad_norm)
    for batch in task.batches:
        trainer.step(jax.tree.map(torch.from_numpy, batch))
        found.append(interop.to_numpy(module))
    right = [to_numpy(like(task.params, one)) for one in expected]
    return _compare("PyTorch", 1, found, right, atol)


def _in_several_parts(name: str, trained: Any) -> Strategy:
    """Makes a strategy of which these parameters use every mechanism: several buckets, the larger half sharded."""
    takes = inspect.signature(STRATEGIES[name]).parameters if name in STRATEGIES else {}
    leaves = sorted((leaf for leaf in jax.tree.leaves(trained) if leaf.size), key=np.size)
    smaller, least = leaves[: len(leaves) // 2], leaves[len(leaves) // 2].size
    bucket_bytes = max(sum(leaf.nbytes for leaf in smaller), 1) / 3
    options = {"bucket_mb": bucket_bytes / 2**20, "min_shard_elements": least}
    return make_strategy(name, **{option: value for option, value in options.items() if option in takes})


# Binds the axis of ranks, over which a loss function may average statistics.
_on_one_rank = partial(jax.shard_map, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


def on_one_device(task: Task) -> list[dict[str, np.ndarray]]:
    """What is compared after each step, by name."""
    trainer = task.trainer
    compute = partial_loss(trainer.loss_fn, trainer.has_aux, trainer.has_state)
    max_norm = trainer.max_grad_norm
    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
    optimizer = optax.with_extra_args_support(trainer.optimizer)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        trained, frozen = split(state.params, trainer.trainable)

        def loss(trained: Any) -> tuple[jax.Array, tuple[Any, Any]]:
            _, (parts, model_state) = compute(merge(trained, frozen), state.model_state, batch, jax.random.key(0))
            value, aux = divide(parts, 1)
            return value, (model_state, aux)

        (value, (model_state, aux)), grads = jax.value_and_grad(loss, has_aux=True)(trained)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)} | ({"aux": aux} if trainer.has_aux else {})
        grads, _ = clip.update(grads, clip.init(None))
        updates, opt_state = optimizer.update(grads, state.opt_state, trained, value=value)
        params = merge(optax.apply_updates(trained, updates), frozen)
        return state._replace(params=params, opt_state=opt_state, model_state=model_state), metrics

    run, after = jax.jit(_on_one_rank(step, mesh=data_mesh(1))), []
    first = split(task.params, trainer.trainable)[0]
    nothing: Any = ()  # for what is not compared
    state = TrainState(nothing, task.params, optimizer.init(first), nothing, task.model_state)
    for batch in task.batches:
        state, metrics = jax.block_until_ready(run(state, batch))
        after.append(_bare(on_host(state) | on_host({"metrics": metrics})))
    if jax.tree.all(jax.tree.map(np.array_equal, first, split(state.params, trainer.trainable)[0])):
        raise ValueError("params must move: the loss does not depend on them, or the learning rate is 0")
    return after


def _bare(named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by their own names, and the rest with the part of the state that has it."""
    return {name.replace("params.", "", 1): leaf for name, leaf in named.items()}


def _trained(trainer: Trainer, state: TrainState, batches: Sequence[Any]) -> Iterator[dict[str, np.ndarray]]:
    for batch in batches:
        state, metrics = trainer.step(state, batch)
        unlike = {name: leaf for name, leaf in on_host(state).items() if name.startswith(COPIES)}
        yield _bare(dict(to_host(trainer, state)) | on_host({"metrics": metrics}) | unlike)


def _compare(
    name: str, num_ranks: int, trained: Iterable[dict[str, np.ndarray]], expected: Sequence[Any], atol: float
) -> Result:
    first: tuple[int | None, str | None] = (None, None)
    largest = 0.0
    for step, (found, right) in enumerate(zip(trained, expected, strict=True), 1):
        apart = {leaf: difference(found[leaf], array) for leaf, array in right.items()}
        apart |= {leaf: np.inf for leaf in found if leaf.startswith(COPIES)}
        largest = float(np.max([largest, *apart.values()]))  # NaN stays
        parted = [leaf for leaf, one in apart.items() if not one <= atol]
        if parted and first[0] is None:
            first = step, parted[0]
    ended = {leaf: found[leaf] for leaf in expected[-1] if not leaf.startswith(("opt_state", "metrics."))}
    return Result(name, num_ranks, largest, *first, params=ended)
