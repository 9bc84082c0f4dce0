"""Random training under jaxddp, against the same training on one process: weights, loss, replicas, plan, bytes.

A case is drawn from its seed alone: a tree of parameters, terms of a loss, an optimizer, a strategy and options. The
reference knows no ranks: it calls the loss for the examples of each rank and micro-batch in turn, and adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

import jaxddp
from jaxddp.communication.collectives import as_varying
from jaxddp.communication.traces import plan_trace, trace_gradients
from jaxddp.comparison_test import planned_collectives
from jaxddp.loss import partial_loss

NUM_STEPS = 3
FEATURES = 3
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (5,), (8,), (0,), (3, 3), (4, 4), (2, 3), (3, 2, 2), (6, 5))
FORMS = ("dict", "nested", "list", "array", "empty key")
TERMS = ("data", "loop", "branch", "linear", "quadratic", "rank", "rank in a loop", "rank in a branch", "unit", "units")
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("naive", {}),
    ("flat", {}),
    ("overlapped", {}),
    ("bucketed", {"bucket_mb": 5e-5}),
    ("bucketed", {}),
    ("zero1", {"bucket_mb": 5e-5}),
    ("zero1", {}),
    ("zero2", {"bucket_mb": 5e-5}),
    ("zero2", {}),
    ("zero3", {"min_shard_elements": 0}),
    ("zero3", {"min_shard_elements": 6}),
    ("zero1", {"bucket_mb": 5e-5, "shard": "leaves"}),
    ("zero2", {"shard": "leaves"}),
)
OWN_LOOPS = ("naive", "flat", "overlapped", "bucketed")
REFUSALS = ("element-wise", "update each parameter by itself")

_rank: ContextVar[Any] = ContextVar("rank", default=None)  # in the reference; on a mesh the axes say it


def _transpose(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params

    def transposed(leaf: Any) -> Any:
        is_square = leaf.ndim == 2 and leaf.shape[0] == leaf.shape[1]
        return lax.reshape(leaf, leaf.shape, (1, 0)) if is_square else leaf

    return jax.tree.map(transposed, updates), state


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


ELEMENTWISE: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    # Eps is large beside the rounding of a gradient that nearly cancels, or that alone would decide the update.
    "adam": lambda: optax.adam(0.05, eps=1e-3),
    "adamw": lambda: optax.adamw(0.05, eps=1e-3, weight_decay=0.1, mask=_matrices),
    "rmsprop": lambda: optax.rmsprop(0.05, eps=1e-3),
    "lion": lambda: optax.lion(0.01),
    "scheduled": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 5), eps=1e-3),
    "decayed": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "lamb": lambda: optax.lamb(0.05),
    "clipped by optax": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "centralized": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "transposing": lambda: optax.chain(
        optax.GradientTransformation(lambda params: optax.EmptyState(), _transpose), optax.sgd(0.1)
    ),
    "block clipped": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
}
OPTIMIZERS = ELEMENTWISE | OTHERS


@dataclass(frozen=True)
class Case:
    """One training run, drawn from a seed."""

    seed: int
    form: str
    shapes: tuple[tuple[int, ...], ...]
    terms: tuple[tuple[str, tuple[int, ...]], ...]  # what the loss adds up, of which parameters
    optimizer: str
    strategy: tuple[str, dict[str, Any]]
    num_ranks: int
    num_microbatches: int
    frozen: tuple[int, ...]
    weighted: bool
    has_aux: bool
    keyed: bool
    max_grad_norm: float | None
    dtype: str
    hook: str
    state_sync: str | None  # of a model state, None without one
    bad_step: int | None  # has a NaN in one example, and is to be skipped
    compute_dtype: str | None
    own_loop: str  # "" without, else "check_vma" or "no check_vma": what it has besides the trainer
    replicas: int  # groups of ranks that ZeRO shards within
    is_weight_bad: bool  # whether the NaN is in a weight
    checkpoints_units: bool


def draw(seed: int) -> Case:
    """Draws a case."""
    rng = np.random.default_rng(seed)

    def one_of(options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    form = one_of(FORMS)
    num_params = 1 if form in ("array", "empty key") else int(rng.integers(1, 6))
    shapes = tuple(one_of(SHAPES) for _ in range(num_params))
    if not any(map(math.prod, shapes)):
        shapes = ((5,), *shapes[1:])
    sized = [place for place, shape in enumerate(shapes) if math.prod(shape)]

    def some() -> tuple[int, ...]:
        return tuple(sorted({one_of(sized) for _ in range(int(rng.integers(1, 3)))}))

    terms = tuple((one_of(TERMS), some()) for _ in range(int(rng.integers(1, 5))))
    strategy = one_of(STRATEGIES)
    frozen = tuple(place for place in range(num_params) if num_params > 1 and rng.random() < 0.15)
    if set(frozen) >= set(sized):
        frozen = ()
    dtype = one_of(("float64", "float64", "float64", "float32"))
    narrow = dtype == "float32" and strategy[0] == "bucketed" and rng.random() < 0.5
    case = Case(
        seed, form, shapes, terms,
        optimizer=one_of(list(ELEMENTWISE if rng.random() < 0.75 else OTHERS)),
        strategy=strategy,
        num_ranks=one_of((1, 2, 2, 3, 4, 8)),
        num_microbatches=one_of((1, 1, 2, 3)),
        frozen=frozen,
        weighted=rng.random() < 0.25, has_aux=rng.random() < 0.3, keyed=rng.random() < 0.25,
        max_grad_norm=one_of((None, None, None, 0.05)),
        dtype=dtype,
        hook=one_of(("bf16", "fp16")) if narrow else "none",
        state_sync=one_of((None, None, "mean", "first")),
        bad_step=one_of((None, None, None, 0, 1)),
        compute_dtype=one_of((None, None, "float32")) if dtype == "float64" else None,
        own_loop=one_of(("", "", "check_vma", "no check_vma")) if strategy[0] in OWN_LOOPS else "",
        replicas=1, is_weight_bad=False, checkpoints_units=False,
    )  # fmt: skip
    return replace(
        case,
        replicas=2 if case.num_ranks in (4, 8) and rng.random() < 0.5 else 1,
        is_weight_bad=case.weighted and case.bad_step is not None and rng.random() < 0.5,
        checkpoints_units=rng.random() < 0.5 and any(kind in ("unit", "units") for kind, _ in terms),
    )


def check(case: Case) -> str | None:
    """Runs a case.

    Returns:
        What is wrong with it, in one line; None if it is right, or refused where it may be.
    """
    with jax.enable_x64(case.dtype == "float64"):
        wrong = _Run(case).check()
        if wrong or not case.own_loop:
            return wrong
        plain = replace(
            case, num_microbatches=1, frozen=(), keyed=False, state_sync=None, bad_step=None, max_grad_norm=None,
            compute_dtype=None, replicas=1,
        )  # fmt: skip
        wrong = _Run(plain).check_own_loop()
        return wrong and f"own loop: {wrong}"


class _Run:
    """A case, with its arrays."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng((case.seed, 1))
        leaves = [self._array(shape) for shape in case.shapes]
        self.names = _names(case.form, len(leaves))
        self.params = _tree(case.form, leaves)
        self.constants = [
            self._array((FEATURES, max(math.prod(shape), 1))) / (1 + math.prod(shape)) ** 0.5 for shape in case.shapes
        ]
        self.batches = [self._batch() for _ in range(NUM_STEPS)]
        if case.bad_step is not None:
            examples = self.batches[case.bad_step]["mask" if case.is_weight_bad else "x"]
            examples[int(self.rng.integers(len(examples)))] = np.nan
        self.model_state: Any = ()
        if case.state_sync:
            zero = np.zeros((), case.dtype)
            self.model_state = {"mean": np.zeros(FEATURES, case.dtype), "each": zero, "count": np.int32(0)}

    def _array(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self.rng.normal(size=shape), self.case.dtype)

    def _batch(self) -> dict[str, np.ndarray]:
        case = self.case
        parts, rows = case.num_ranks * case.num_microbatches, int(self.rng.integers(1, 4))
        mask = (self.rng.random(parts * rows) < 0.6).astype(case.dtype)
        return {
            "x": self._array((parts * rows, FEATURES)),
            "mask": np.maximum(mask, np.eye(1, parts * rows, dtype=case.dtype)[0]),
            "slot": np.repeat(np.arange(parts), rows),
        }

    def trainable(self, name: str) -> bool:
        return self.names.index(name) not in self.case.frozen

    def loss_fn(self, params: Any, state: Any, batch: Any, draw: Any) -> tuple[Any, Any, Any]:
        """The loss of one rank's micro-batch, whose noise is ``draw``; then its aux values and the next model state."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
        each = jnp.zeros(batch["x"].shape[:1], batch["x"].dtype)
        alike = jnp.zeros((), each.dtype)
        for kind, places in self.case.terms:
            args = [leaves[i] for i in places], [self.constants[i] for i in places], batch, self.case.checkpoints_units
            of_examples, of_none = _term(kind, *args)
            each, alike = each + of_examples, alike + of_none
        if draw is not None:
            each = each * (1 + 0.1 * draw)
        if self.case.state_sync:
            each = each * (1 + 0.1 * jnp.tanh(jnp.sum(state["mean"]) + state["each"] + state["count"]))
            share = batch["mask"] / jnp.sum(batch["mask"]) if self.case.weighted else jnp.ones_like(each) / each.size
            state = {
                "mean": 0.5 * state["mean"] + share @ batch["x"],  # NaN where no example counts
                "each": 0.5 * state["each"] + share @ each,
                "count": state["count"] + 1 + _rank_here(),
            }
        aux: dict[str, Any] = {"square": jnp.mean(each**2)}
        if self.case.weighted:
            counted = jnp.nan_to_num(batch["mask"])  # a weight that is NaN is so in a total that is not
            total = jnp.sum(each * counted) + alike * jnp.sum(counted)
            loss: Any = jaxddp.Weighted(total, jnp.sum(batch["mask"]))
            aux = {"square": jaxddp.Weighted(jnp.sum(each**2), jnp.asarray(each.size))}
        else:
            loss = jnp.mean(each) + alike
        return loss, aux, state

    def check(self) -> str | None:
        case, trainer = self.case, self._trainer()
        try:
            state = trainer.init(self.params, model_state=self.model_state or None)
        except ValueError as error:
            is_allowed = case.optimizer in OTHERS and case.strategy[0] in ("zero1", "zero2", "zero3")
            if is_allowed and any(reason in str(error) for reason in REFUSALS):
                return None
            return f"refused: {error}"
        if wrong := self._bytes(trainer, state):
            return wrong
        planned = sorted(trainer.planned(state, self.batches[0]))
        schedule = jaxddp.read_schedule(trainer.compile(state, self.batches[0]))
        compiled = schedule.gradient_collectives()
        synced = sorted((one.kind, one.num_bytes) for one in schedule.collectives() if one.is_model_state)
        reference = _Reference(self, OPTIMIZERS[case.optimizer]())
        for step, batch in enumerate(self.batches):
            state, metrics = trainer.step(state, batch)
            if wrong := self._step(reference, step, batch, metrics):
                return wrong
        if wrong := self._weights(trainer, state, reference):
            return wrong
        if case.state_sync and synced != sorted(trainer.programs(state).planned_sync(state)):
            return f"planned {trainer.programs(state).planned_sync(state)} for the model state, compiled {synced}"
        return None if planned == compiled else f"planned {planned}, compiled {compiled}"

    def _trainer(self) -> jaxddp.Trainer:
        case = self.case
        name, options = case.strategy
        if case.hook != "none":
            options = options | {"hook": getattr(jaxddp.hooks, case.hook)}
        parts = case.num_ranks * case.num_microbatches

        def on_rank(params: Any, state: Any, batch: Any, *key: jax.Array) -> Any:
            noise = jax.random.uniform(key[0], (), batch["x"].dtype) if key else None
            loss, aux, state = self.loss_fn(params, state, batch, noise)
            if key:  # so that the reference hears which noise it was
                slots = jnp.zeros(parts, batch["x"].dtype).at[batch["slot"][0]].set(noise)
                aux = aux | {"noise": jaxddp.Weighted(slots, jnp.asarray(1))}
            has_aux = case.has_aux or case.keyed
            if case.state_sync:
                return loss, ((state, aux) if has_aux else state)
            return (loss, aux) if has_aux else loss

        forms: dict[tuple[bool, bool], Callable[..., Any]] = {
            (False, False): lambda params, batch: on_rank(params, (), batch),
            (False, True): lambda params, batch, key: on_rank(params, (), batch, key),
            (True, False): lambda params, state, batch: on_rank(params, state, batch),
            (True, True): lambda params, state, batch, key: on_rank(params, state, batch, key),
        }
        return jaxddp.Trainer(
            forms[case.state_sync is not None, case.keyed], OPTIMIZERS[case.optimizer](),
            jaxddp.make_strategy(name, **options), jaxddp.data_mesh(case.num_ranks, replicas=case.replicas),
            num_microbatches=case.num_microbatches, trainable=self.trainable if case.frozen else None,
            has_aux=case.has_aux or case.keyed, max_grad_norm=case.max_grad_norm,
            has_state=case.state_sync is not None, state_sync=case.state_sync or "mean",
            nonfinite="ignore" if case.bad_step is None else "skip", compute_dtype=case.compute_dtype,
        )  # fmt: skip

    def _step(self, reference: _Reference, step: int, batch: Any, metrics: Any) -> str | None:
        """Takes the step in the reference."""
        case = self.case
        noise = np.asarray(metrics["aux"]["noise"]) * case.num_ranks * case.num_microbatches if case.keyed else None
        loss, aux, skipped = reference.step(batch, noise)
        if int(metrics.get("skipped", 0)) != skipped:
            return f"step {step} was {'not ' * bool(skipped)}skipped"
        if skipped:
            return None
        if not _close(metrics["loss"], loss, self.atol):
            return f"loss of step {step} is {float(metrics['loss'])!r}, not {float(loss)!r}"
        if case.has_aux and not _close(metrics["aux"]["square"], aux, self.atol):
            return f"aux of step {step} is {float(metrics['aux']['square'])!r}, not {float(aux)!r}"
        return None

    def _weights(self, trainer: jaxddp.Trainer, state: Any, reference: _Reference) -> str | None:
        for leaf in jax.tree.leaves(state.params):
            copies = leaf.addressable_shards if leaf.is_fully_replicated else []
            if len({np.asarray(one.data).tobytes() for one in copies}) > 1:
                return "replicas differ"
        pairs = {"weights": (trainer.params(state), reference.params)}
        if self.case.state_sync:
            pairs["model state"] = trainer.model_state(state), reference.model_state
        for what, trees in pairs.items():
            furthest = max(_distance(a, b) for a, b in zip(*map(jax.tree.leaves, trees), strict=True))
            if not furthest <= self.atol:
                return f"{what} {furthest:.1e} off"
        return None

    def check_own_loop(self) -> str | None:
        """Trains by ``value_and_grad`` in a loop of its own."""
        case, (name, options) = self.case, self.case.strategy
        if case.hook != "none":
            options = options | {"hook": getattr(jaxddp.hooks, case.hook)}
        strategy, mesh = jaxddp.make_strategy(name, **options), jaxddp.data_mesh(case.num_ranks)
        optimizer = optax.with_extra_args_support(OPTIMIZERS[case.optimizer]())

        def loss_fn(params: Any, batch: Any) -> Any:
            loss, aux, _ = self.loss_fn(params, (), batch, None)
            return (loss, aux) if case.has_aux else loss

        planned: list[tuple[str, int]] = []

        def on_rank(params: Any, opt_state: Any, batch: Any) -> Any:
            grad_fn = jax.grad(partial_loss(loss_fn, case.has_aux), has_aux=True)
            trace = trace_gradients(grad_fn, as_varying(params, "data"), (), batch, None, has_aux=True)
            plan = plan_trace(strategy, trace.with_constants_sent())
            planned[:] = planned_collectives(strategy, plan, case.num_ranks, "cpu")

            mean_loss_and_grad = jaxddp.value_and_grad(loss_fn, strategy, has_aux=case.has_aux)
            result, grads = mean_loss_and_grad(params, batch)
            loss, aux = result if case.has_aux else (result, {"square": None})
            updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
            return optax.apply_updates(params, updates), opt_state, loss, aux["square"]

        whole, split = PartitionSpec(), PartitionSpec("data")
        step = jax.shard_map(
            on_rank, mesh=mesh, in_specs=(whole, whole, split), out_specs=whole,
            check_vma=case.own_loop == "check_vma",
        )  # fmt: skip
        params = jax.tree.map(jnp.asarray, self.params)
        opt_state, reference = optimizer.init(params), _Reference(self, optimizer)
        program = jaxddp.jit(step, strategy).lower(params, opt_state, self.batches[0]).compile()
        if (compiled := jaxddp.read_schedule(program).gradient_collectives()) != sorted(planned):
            return f"planned {sorted(planned)}, compiled {compiled}"
        program = jaxddp.jit(step, strategy)
        for number, batch in enumerate(self.batches):
            params, opt_state, loss, square = jax.block_until_ready(program(params, opt_state, batch))
            if wrong := self._step(reference, number, batch, {"loss": loss, "aux": {"square": square}}):
                return wrong
        found, right = jax.tree.leaves(params), jax.tree.leaves(reference.params)
        furthest = max(_distance(a, b) for a, b in zip(found, right, strict=True))
        return None if furthest <= self.atol else f"weights are {furthest:.1e} off"

    @property
    def atol(self) -> float:
        if self.case.hook != "none":
            return 0.2  # signs of tiny gradients may turn under Adam: only gross errors are seen
        if self.case.compute_dtype:
            return 1e-5  # gradients are rounded to float32, 6e-8, of which cancellation under Adam leaves more
        return 1e-12 if self.case.dtype == "float64" else 2e-3

    def _bytes(self, trainer: Any, state: Any) -> str | None:
        layout = trainer.layout(state)
        for tree, places in ((state.params, layout.params), (state.opt_state, layout.opt_state)):
            held = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree)]
            planned = [leaf.bytes_on_rank for leaf in jax.tree.leaves(places)]
            if held != planned:
                return f"a rank holds {held} bytes, not {planned}"
        if layout.owners is None and self.case.strategy[0] in ("zero1", "zero2"):
            sizes = [math.prod(s) for i, s in enumerate(self.case.shapes) if i not in self.case.frozen]
            most = max(-(-size * self.case.replicas // self.case.num_ranks) for size in sizes)
            for leaf in jax.tree.leaves(state.opt_state):
                if leaf.addressable_shards[0].data.size > max(most, 1):
                    return f"a rank holds a state of {leaf.addressable_shards[0].data.size} elements, at most {most}"
        return None


class _Reference:
    """The same training without ranks."""

    def __init__(self, run: _Run, optimizer: Any) -> None:
        self.run, self.params = run, jax.tree.map(jnp.asarray, run.params)
        leaves, self.structure = jax.tree.flatten(self.params)
        self.trained = [i for i in range(len(leaves)) if i not in run.case.frozen]
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.opt_state = self.optimizer.init(self._split(self.params))
        self.model_state = jax.tree.map(jnp.asarray, run.model_state)
        self._update = jax.jit(self._step)

    def step(self, batch: Any, noise: Any) -> tuple[Any, Any, bool]:
        """Takes a step, or leaves it out as it should be; then the loss, the aux value and whether it did."""
        *new, loss, aux, is_finite = self._update(self.params, self.opt_state, self.model_state, batch, noise)
        skipped = self.run.case.bad_step is not None and not is_finite
        if not skipped:
            self.params, self.opt_state, self.model_state = new
        return loss, aux, skipped

    def _split(self, params: Any) -> Any:
        leaves = [leaf if i in self.trained else None for i, leaf in enumerate(jax.tree.leaves(params))]
        return jax.tree.unflatten(self.structure, leaves)

    def _step(self, params: Any, opt_state: Any, model_state: Any, batch: Any, noise: Any) -> Any:
        case = self.run.case
        parts = case.num_ranks * case.num_microbatches
        rows = batch["x"].shape[0] // parts

        def mean_loss(trained: Any) -> tuple[Any, Any]:
            leaves = jax.tree.leaves(params)
            for i, leaf in zip(self.trained, jax.tree.leaves(trained), strict=True):
                leaves[i] = leaf
            masters = jax.tree.unflatten(self.structure, leaves)
            totals, weights, squares, counts, states = [], [], [], [], []
            for part in range(parts):
                if part % case.num_microbatches == 0:
                    states.append(model_state)
                # A cast for each part: its gradient is rounded, and those of parts are added up as wide as masters.
                whole = jax.tree.map(lambda leaf: leaf.astype(case.compute_dtype or leaf.dtype), masters)
                some = {key: value[part * rows : (part + 1) * rows] for key, value in batch.items()}
                token = _rank.set(part // case.num_microbatches)
                try:
                    draw = None if noise is None else noise[part]
                    loss, aux, state = self.run.loss_fn(whole, states[-1], some, draw)
                finally:
                    _rank.reset(token)
                state = lax.stop_gradient(state)  # it is no path from a micro-batch to the gradients of the next
                if case.weighted:
                    state = jax.tree.map(partial(jnp.where, loss.weight == 0), states[-1], state)
                states[-1] = state
                square = aux["square"]
                totals.append(loss.total if case.weighted else loss)
                weights.append(loss.weight if case.weighted else 1.0)
                squares.append(square.total if case.weighted else square)
                counts.append(square.weight if case.weighted else 1)
            return sum(totals) / sum(weights), (sum(squares) / sum(counts), states)

        trained = self._split(params)
        (loss, (aux, states)), grads = jax.value_and_grad(mean_loss, has_aux=True)(trained)
        model_state = states[0]
        if case.state_sync == "mean":
            model_state = {name: sum(state[name] for state in states) / len(states) for name in ("mean", "each")}
            model_state["count"] = states[0]["count"]
        is_finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, grads, model_state))]).all()
        if case.max_grad_norm is not None:
            norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))
            scale = jnp.minimum(1.0, jnp.asarray(case.max_grad_norm) / norm)
            grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        updates, opt_state = self.optimizer.update(grads, opt_state, trained, value=loss)
        updated = iter(jax.tree.leaves(optax.apply_updates(trained, updates)))
        leaves = [next(updated) if i in self.trained else leaf for i, leaf in enumerate(jax.tree.leaves(params))]
        return jax.tree.unflatten(self.structure, leaves), opt_state, model_state, loss, aux, is_finite


def _rank_here() -> Any:
    rank = _rank.get()
    if rank is not None:
        return rank
    is_split = "replica" in jax.sharding.get_abstract_mesh().axis_names
    return lax.axis_index(("replica", "data") if is_split else "data")


def _term(kind: str, leaves: list[Any], constants: list[Any], batch: Any, checkpoints_units: bool) -> tuple[Any, Any]:
    """One summand of the loss: ``[examples]``, and what is the same of all examples."""
    x, zeros = batch["x"], jnp.zeros(batch["x"].shape[:1], batch["x"].dtype)
    pairs = list(zip(leaves, constants, strict=True))

    def features(x: Any, leaf: Any, constant: Any) -> Any:
        return jnp.tanh(x @ (constant @ leaf.reshape(-1)))

    def noise(rank: Any, i: Any) -> Any:
        return jnp.sin(1.0 + rank + 2 * i).astype(x.dtype)

    if kind == "data":
        return sum(features(x, *pair) for pair in pairs), 0.0
    if kind == "loop":
        total = [lax.map(lambda row, pair=pair: features(row, *pair), x) for pair in pairs]
        return sum(total), 0.0
    if kind == "branch":
        return sum(
            lax.cond(jnp.sum(leaf) > 0, lambda p: features(x, *p), lambda p: 2 * features(x, *p), (leaf, constant))
            for leaf, constant in pairs
        ), 0.0
    if kind == "linear":
        return zeros, sum(jnp.sum(leaf.reshape(-1) * constant[0]) for leaf, constant in pairs)
    if kind == "quadratic":
        return zeros, sum(jnp.sum(leaf**2) for leaf in leaves)
    if kind == "rank":
        return zeros, sum(noise(_rank_here(), 0) * jnp.sum(leaf) for leaf in leaves)
    if kind == "rank in a loop":
        total = lax.map(lambda i: noise(_rank_here(), i), jnp.arange(2)).sum()
        return zeros, sum(total * jnp.sum(leaf) for leaf in leaves)
    if kind == "rank in a branch":
        # Both branches depend on the rank: in a shard_map that checks, JAX refuses others.
        total = lax.cond(jnp.array(True), lambda: noise(_rank_here(), 0), lambda: 0 * noise(_rank_here(), 1))
        return zeros, sum(total * jnp.sum(leaf) for leaf in leaves)
    unit = jaxddp.layer(lambda pair, x: x + features(x, *pair)[:, None])
    if checkpoints_units:
        unit = jax.checkpoint(unit)
    hidden = x
    for pair in pairs * (2 if kind == "units" else 1):
        hidden = unit(pair, hidden)
    return jnp.mean(hidden**2, axis=1), 0.0


def _tree(form: str, leaves: list[Any]) -> Any:
    if form == "array":
        return leaves[0]
    if form == "empty key":
        return {"": leaves[0]}
    if form == "list":
        return leaves
    if form == "nested":
        return {"a": leaves[:2], "b": {f"k{i}": leaf for i, leaf in enumerate(leaves[2:])}}
    return {f"p{i}": leaf for i, leaf in enumerate(leaves)}


def _names(form: str, num: int) -> list[str]:
    return list(jaxddp.named_leaves(_tree(form, list(range(num)))))


def _distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    return float(np.max(np.abs(a - b) / (1 + np.abs(b)), initial=0.0)) if np.isfinite(a).all() else math.inf


def _close(a: Any, b: Any, atol: float) -> bool:
    return _distance(a, b) <= atol
